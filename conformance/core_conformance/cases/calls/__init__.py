"""Cases on calls of a captured program."""
