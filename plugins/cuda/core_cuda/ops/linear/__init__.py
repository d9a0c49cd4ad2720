"""Products of few rows, plain and quantised."""
