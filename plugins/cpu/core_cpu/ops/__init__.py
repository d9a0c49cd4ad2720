"""The plugin's kernels as implementations of canonical ops."""
