"""Fake kernels for ops of foreign libraries: declared as data by plugins, applied where the library lacks them."""

from core.common.fakes.declaration import FakeOp, FakeResult, ShapeRule
from core.common.fakes.registering import apply_fakes, apply_late, has_fake
from core.common.fakes.rules import Rule, argument, half_last, like, new, nothing, part, results, with_last
from core.common.fakes.sizes import arg, computed, size

__all__ = [
    "FakeOp",
    "FakeResult",
    "Rule",
    "ShapeRule",
    "apply_fakes",
    "apply_late",
    "arg",
    "argument",
    "computed",
    "half_last",
    "has_fake",
    "like",
    "new",
    "nothing",
    "part",
    "results",
    "size",
    "with_last",
]
