"""Passes over collectives: recognising them, fusing what follows, and splitting them to work on parts of the tokens.

A pass is skipped in a job of one process. Its parameters limit it to some groups and sizes (limits.py).
"""
