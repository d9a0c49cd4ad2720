"""Lifts of what recurrent layers compute for one token of each sequence."""
