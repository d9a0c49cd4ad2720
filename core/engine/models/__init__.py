"""Models of transformers: found, read from a folder, built, quantised."""
