"""Passes over collectives: recognising them, fusing what follows, and splitting them to work on parts of the tokens.

A pass is skipped where the job has one process. Which groups and sizes it is for, its parameters say (limits.py).
"""
