"""What a run found, as data and in each of its forms."""
