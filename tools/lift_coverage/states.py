"""Which module calls of a run keep a state: short convolutions, and recurrences that decay."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lift_coverage.observe import ModuleCall, Op
from lift_coverage.walk import Walk

_MAX_LENGTH = 8
"""Steps that a short convolution sees at most; those of encoders for speech see more."""
# State spaces (Mamba), the delta rule, linear attention with a decay (lightning, RWKV), gated units (RG-LRU, xLSTM).
_RECURRENT = re.compile(
    r"mamba|mixer|ssm|delta_?(net|attention|rule)|linear_?att|lightning|lru|rwkv|lstm", re.IGNORECASE
)
_NO_RECURRENT = re.compile(r"norm|gate$", re.IGNORECASE)


def convolutions(walk: Walk) -> Iterator[ModuleCall]:
    """Yield the module call of each causal convolution of single channels over at most `_MAX_LENGTH` steps.

    Either a convolution by as many groups as channels, from whose input or output the steps to come were cut, or the
    sum over a window of channels, steps times such a weight.
    """
    for op in walk.seen.ops:
        if op.call >= 0 and (_convolves(walk, op) or _sums_window(walk, op)):
            yield walk.seen.calls[op.call]


def recurrences(walk: Walk) -> Iterator[ModuleCall]:
    """Yield the calls of modules named like a recurrence that take an exponential, the decay, themselves."""
    for call in walk.seen.calls:
        named = _RECURRENT.search(call.class_name) and not _NO_RECURRENT.search(call.class_name)
        if named and any(op.name in ("exp", "exp2") for op in walk.own.get(call.index, ())):
            yield call


def _convolves(walk: Walk, op: Op) -> bool:
    if op.name != "convolution" or len(op.inputs) < 2:
        return False
    weight = walk.seen.values[op.inputs[1]].shape
    if not _is_weight(weight) or op.numbers[-1] != weight[0]:
        return False
    # stride, padding and dilation of one dimension each, the output's padding, groups
    return op.numbers[1] in (0, weight[2] - 1)


def _sums_window(walk: Walk, op: Op) -> bool:
    made = walk.seen.producer(op.inputs[0]) if op.name == "sum" else None
    if made is None or made.name not in ("mul", "mul_") or len(made.inputs) != 2:
        return False
    window, weight = sorted(made.inputs, key=lambda value: -len(walk.seen.values[value].shape))
    shape, filters = walk.seen.values[window].shape, walk.seen.values[walk.source(weight)].shape
    return len(shape) == 3 and _is_weight(filters) and shape[1:] == (filters[0], filters[2])


def _is_weight(shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor [channels, 1, steps] filters each channel by itself."""
    return len(shape) == 3 and shape[0] > 1 and shape[1] == 1 and 1 < shape[2] <= _MAX_LENGTH
