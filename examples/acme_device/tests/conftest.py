"""What tests of kernels share: one call of a canonical op judged against its reference, arguments included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp
from core.verify.compare import compare
from core_conformance.rules.oracle import exact, own
from torch import Tensor

NULL_BLOCK = ("key_cache", "value_cache")  # of these, block 0 is nobody's

Call = dict[str, Any]
Judge = Callable[[str, Callable[..., Any], Mapping[str, Any]], str]


def canonical(op: str) -> CanonicalOp:
    """Return the canonical op of that short name."""
    return next(declared for declared in OPS if declared.name == op)


def outputs(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of all dimensions over which there is something to stride."""
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1) if tensor.numel() else ()


@pytest.fixture
def fault_of() -> Judge:
    """Return what tells what is wrong with a call of an implementation, "" for nothing."""

    def judge(name: str, function: Callable[..., Any], call: Mapping[str, Any]) -> str:
        op, ours, theirs = canonical(name), own(call), own(call)
        positional = [a.name for a in op.overload._schema.arguments if not a.kwarg_only]

        def run(fn: Callable[..., Any], given: Call) -> tuple[Tensor, ...]:
            rest = {key: value for key, value in given.items() if key not in positional}
            return outputs(fn(*(given[key] for key in positional), **rest))

        results, eager = run(function, ours), run(op.reference, theirs)
        given, left = exact(op.reference, call)
        reference = outputs(given)
        for result, expected, true in zip(results, eager, reference, strict=True):
            metadata = (
                (result.dtype, result.shape, strides(result)),
                (expected.dtype, expected.shape, strides(expected)),
            )
            if metadata[0] != metadata[1]:
                return f"{metadata[0]} instead of {metadata[1]}"
            outcome = compare(result, expected, lambda true=true: true)  # type: ignore[misc]  # a lambda's default
            if outcome is None or outcome[0]:
                return f"a result: {outcome}"
        for key, value in ours.items():
            held = slice(1 if key in NULL_BLOCK else 0, None)
            if not isinstance(value, Tensor) or not value.dim() or same(value[held], theirs[key][held]):
                continue
            outcome = compare(value[held], theirs[key][held], lambda true=left[key][held]: true)  # type: ignore[misc]
            if outcome is None or outcome[0]:
                return f"argument {key} is left otherwise: {outcome}"
        return ""

    return judge


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, NaN to NaN."""
    return torch.equal(torch.nan_to_num(a.float(), 7e7), torch.nan_to_num(b.float(), 7e7))
