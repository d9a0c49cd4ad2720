"""`torch.library.opcheck` on the custom ops that implementations call, found by looking on while they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from core.verify.execution import Copies, error_line
from core_conformance.trial import Trial

OWN = frozenset({"aten", "prim", "prims", "core", "c10d", "_c10d_functional", "profiler"})
"""Namespaces of torch and of this project; all else is a vendor's or a library's."""

_CALLS_EACH = 3
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)

Recorded = dict[str, list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]]


class Recorder(TorchDispatchMode):
    """Keeps the first calls, with arguments as they were, of each custom op that runs in it.

    calls: name of an overload -> its calls, which differ in shape, dtype or options.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Recorded = {}
        self._seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call and run it."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func.namespace not in OWN:
            kept = self.calls.setdefault(func.name(), [])
            kind = repr((func.name(), pytree.tree_map(_kind, (args, kwargs))))
            if len(kept) < _CALLS_EACH and kind not in self._seen:
                self._seen.add(kind)
                copies = Copies()
                kept.append((func, *pytree.tree_map(copies.of, (tuple(args), dict(kwargs)))))
        return func(*args, **kwargs)


def _kind(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, Tensor) else value


def check_recorded(trial: Trial, calls: Recorded) -> None:
    """Check every op that was recorded, the first call of each also with symbolic shapes."""
    for name, kept in calls.items():
        for index, (op, args, kwargs) in enumerate(kept):
            check(trial, f"{name}, call {index + 1}", op, args, kwargs, dynamic=not index)


def check(
    trial: Trial,
    name: str,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic: bool,
) -> None:
    """Require that torch finds schema and fake of an op true of this call, and with dynamic, a traced graph of it."""
    tests = ["test_faketensor"]
    # torch's test of schemas compares the arguments before and after, which it can't do for fp8.
    if not any(isinstance(leaf, Tensor) and leaf.dtype in _CODES for leaf in pytree.tree_leaves((args, kwargs))):
        tests.append("test_schema")
    if dynamic:
        tests.append("test_aot_dispatch_dynamic")
    verdicts: Mapping[str, Any]
    with torch.no_grad():
        try:
            verdicts = torch.library.opcheck(op, args, dict(kwargs), test_utils=tests, raise_exception=False)  # type: ignore[arg-type]
        except Exception as error:
            verdicts = {"opcheck": error}
    for test, verdict in verdicts.items():
        reason = error_line(verdict) if isinstance(verdict, BaseException) else ""
        trial.record(f"{name}, {test}", "T0", float("inf") if reason else 0.0, reason)
