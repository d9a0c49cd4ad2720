"""Models on a paged cache, through transformers' attention interface."""
