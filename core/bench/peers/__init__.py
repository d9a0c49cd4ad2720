"""Peers of `core bench`: which are installed, and each in turns with the other subjects, in a process of its own."""
