"""Checks that a declared fake describes its kernel correctly."""
