"""Installed distributions: their metadata, read one by one, and keeping damaged ones from the rest of the process."""
