"""`core kernels`: kernels that are built before any model is."""
