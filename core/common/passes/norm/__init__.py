"""Lifting: decomposed sequences of a traced graph become canonical ops, one hand-written matcher per op."""
