"""The reference engine: transformers models, unmodified, served on whichever device was selected."""
