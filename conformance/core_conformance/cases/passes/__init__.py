"""Cases on passes."""
