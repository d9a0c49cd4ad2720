"""Heads: small modules that draft from a served model's hidden states, as its checkpoint or another one brings them."""
