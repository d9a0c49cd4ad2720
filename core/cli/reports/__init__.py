"""What subcommands print for a reader: lists and tables that fit 80 columns."""
