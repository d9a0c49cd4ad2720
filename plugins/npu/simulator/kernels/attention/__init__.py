"""Attention of aclnn: over pages, of dense tensors, and copies of pages."""
