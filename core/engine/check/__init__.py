"""A run compared with transformers' own eager model, and the graphs of a model's phases."""
