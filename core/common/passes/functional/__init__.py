"""The pass that puts the writes of a functional graph back in place."""
