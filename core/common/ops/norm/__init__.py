"""Norms, with a residual sum before and a quantisation after."""
