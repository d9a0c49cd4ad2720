"""FlashInfer (github.com/flashinfer-ai/flashinfer), where it is installed, as implementations of canonical ops.

None of them is the first of its op, so none runs unless it was measured to be faster or a user names it. Nothing here
imports FlashInfer before a call is to be run, which takes seconds. What of FlashInfer is not offered, and why, stands
in docs/providers.md.
"""
