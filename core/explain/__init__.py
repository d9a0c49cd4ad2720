"""`explain`: what the passes do to a model's graphs, for a terminal, as JSON and as one HTML page."""
