"""What tensors need whatever the model: copies, indices, reductions, views, formats, random numbers."""
