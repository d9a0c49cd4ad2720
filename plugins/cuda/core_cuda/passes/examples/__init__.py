"""Modules in which the plugin's passes must match, for the conformance suite."""
