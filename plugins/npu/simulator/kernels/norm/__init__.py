"""Norms: of root mean squares, and those of torch that subtract a mean."""
