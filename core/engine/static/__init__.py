"""Models on transformers' static cache, one sequence at a time."""
