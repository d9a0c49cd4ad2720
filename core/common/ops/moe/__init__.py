"""Routers and experts, plain and quantised."""
