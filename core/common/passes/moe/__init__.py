"""Passes that find routers and experts."""
