"""What a model is found to do before it serves: its attention, its masks, its rounding."""
