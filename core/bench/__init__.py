"""`core bench`: transformers eager, torch.compile and `core` side by side, against the floor that memory sets."""
