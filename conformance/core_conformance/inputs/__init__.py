"""Inputs of ops: samples, larger sizes, and torch's operators with their formulas."""
