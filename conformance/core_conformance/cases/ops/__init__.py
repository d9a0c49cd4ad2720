"""Cases on operators, canonical and torch's own."""
