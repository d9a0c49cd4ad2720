"""Capturing callables into graphs and replaying them: protocol, static buffers, buckets."""
