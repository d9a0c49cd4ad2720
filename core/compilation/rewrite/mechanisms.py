"""One way to run a pass of any mechanism."""

from __future__ import annotations

from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.results import PassResult
from core.common.passes.rewrite import fuse


def apply_pass(declared: Pass, context: PassContext) -> PassResult:
    """Rewrite the context's graph by the pass; the graph is neither linted nor cleaned."""
    if declared.find is not None:
        return fuse(context, declared.find)
    if declared.run is not None:
        return declared.run(context)
    if declared.mechanism == "replace_pattern":
        from core.compilation.rewrite.fx_patterns import replace_patterns

        return replace_patterns(context, declared.patterns)
    # Inductor's matcher takes a second to import; only passes that use it pay.
    from core.compilation.rewrite.inductor_patterns import apply_inductor

    return apply_inductor(context, declared)
