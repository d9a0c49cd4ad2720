"""Criteria, references and tolerances."""
