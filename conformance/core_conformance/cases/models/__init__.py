"""Cases on whole models."""
