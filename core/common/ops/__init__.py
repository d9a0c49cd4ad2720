"""Canonical ops: the vocabulary between models and devices, one declaration each."""
