"""Fakes of torch_npu's and ATB's ops, and calls on which they are compared with their kernels."""
