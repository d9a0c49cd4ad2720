"""What ops are called on: samples, larger sizes, and torch's operators with their formulas."""
