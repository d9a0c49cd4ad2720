"""The engine: requests in, completions out."""
