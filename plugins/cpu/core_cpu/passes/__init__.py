"""The processor's own passes: rewrites that pay where threads begin and end with each kernel.

They are given the plugin's ops and conditions by the modules that have them (`PASSES` there).
"""
