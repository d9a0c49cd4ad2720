"""General tensor kernels: copies, indices, reductions, views, formats, random numbers."""
