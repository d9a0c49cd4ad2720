"""Registering declared fake kernels where the library is present and has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload

from core.common.fakes.declaration import FakeOp, FakeResult
from core.common.fakes.rules import Rule
from core.common.fakes.schema import as_kernel, find_overload, mismatch, mutated
from core.common.passes.effects import declare_writes
from core.errors import PluginError

_APPLIED: dict[str, str] = {}


def apply_fakes(declarations: Iterable[FakeOp]) -> tuple[tuple[FakeOp, FakeResult], ...]:
    """Register each declared fake whose op exists and has none yet, and say what became of each.

    Raises `PluginError` for one that contradicts the op's schema: an argument the op lacks, another number of results,
    a result that is an argument where the schema says new memory, or the reverse.
    """
    return tuple((fake, _apply(fake)) for fake in declarations)


def apply_late(fakes: Iterable[tuple[FakeOp, FakeResult]]) -> tuple[FakeOp, ...]:
    """Register the fakes of libraries that were loaded after `apply_fakes`; return those registered now.

    Raises `PluginError` as `apply_fakes` does.
    """
    waiting = (fake for fake, result in fakes if not result.applied)
    return tuple(fake for fake in waiting if _APPLIED.get(fake.op) is None and _apply(fake).applied)


def _apply(fake: FakeOp) -> FakeResult:
    library, _, name = fake.op.partition("::")
    if not library or not name:
        raise PluginError(
            f"fake kernel for {fake.op!r}", found="not a qualified op name", remedy="write it as 'library::op'"
        )
    overload = find_overload(fake.op)
    if overload is None:
        return FakeResult(applied=False, reason=f"op {fake.op} is not loaded in this process")
    schema = overload._schema
    known = _known_writes(fake, overload)
    # A library that is loaded anew has other ops under the same names.
    if _APPLIED.get(fake.op) == str(schema) and has_fake(fake.op):
        return FakeResult(applied=True, reason="registered earlier in this process")
    if has_fake(fake.op) and fake.rule is not None:
        return FakeResult(applied=False, reason=f"op {fake.op} brings a fake kernel of its own{known}")
    problem = mismatch(fake, schema)
    if problem and fake.changes:
        return FakeResult(applied=False, reason=f"op {fake.op} is another version here: {problem}")
    if problem:
        raise PluginError(
            f"fake kernel for {fake.op!r}", found=problem, remedy="declare it as the schema of the installed op has it"
        )
    if fake.rule is None:
        whose = "its library's fake serves" if has_fake(fake.op) else f"op {fake.op} has no fake kernel"
        return FakeResult(applied=has_fake(fake.op), reason=f"{whose}{known}")
    torch.library.register_fake(fake.op, as_kernel(fake.rule, schema) if isinstance(fake.rule, Rule) else fake.rule)
    _APPLIED[fake.op] = str(schema)
    return FakeResult(applied=True, reason=f"registered{known}")


def _known_writes(fake: FakeOp, overload: OpOverload[..., Any]) -> str:
    """Tell passes what the kernel writes against the op's schema, and say so."""
    taken = {each.name for each in overload._schema.arguments} - set(mutated(overload._schema))
    undeclared = [each for each in fake.also_writes if each in taken]
    declare_writes(overload, undeclared)
    return f"; the kernel also writes {', '.join(undeclared)}, which its schema does not declare" if undeclared else ""


def has_fake(op: str) -> bool:
    """Return whether `library::name` can already run on fake tensors (Meta kernel, Python fake, or composite)."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has_kernel(op, key) for key in ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")):
        return True
    entry = torch._library.simple_registry.singleton.find(op)
    return entry.fake_impl.kernel is not None
