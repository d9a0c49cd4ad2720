"""The GPU's own passes: rewrites that pay where each kernel is a launch of its own. `registry` lists them.

They bring kernels of the plugin that implement no canonical op into graphs.
"""
