"""`core` as a backend of `torch.compile`, and the short way that compiles whole pipelines in place."""
