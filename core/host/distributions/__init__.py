"""Installed distributions: reads their metadata one by one, and hides damaged ones from the rest of the process."""
