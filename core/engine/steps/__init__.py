"""One step of a model: its sequences, its inputs, its sampling, and what runs it."""
