"""Passes that find norms, and the residual adds before them."""
