"""The conformance suite: proves a device plugin numerically against eager, and says which level it has reached.

A vendor runs it on its own plugin with `core conformance --device NAME` or with pytest; docs/conformance.md tells how.
"""
