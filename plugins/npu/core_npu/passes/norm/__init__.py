"""Passes around norms."""
