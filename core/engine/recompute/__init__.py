"""Models that neither cache fits: each step computes all tokens of its sequences again, and keeps nothing."""
