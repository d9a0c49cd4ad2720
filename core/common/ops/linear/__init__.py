"""Linear layers with a gate, and on quantised weights alone."""
