"""intel-extension-for-pytorch where it is installed: an implementation of an op, and a lowering."""
