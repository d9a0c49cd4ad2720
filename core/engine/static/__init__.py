"""Models on transformers' static cache: in rows where these give what the model gives alone, else one sequence."""
