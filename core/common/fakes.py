"""Fake kernels for ops of foreign libraries: declared by plugins, applied where the library lacks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.errors import PluginError

if TYPE_CHECKING:
    from core.common.ops.declaration import Sample

ShapeRule = Callable[..., Any]
"""Takes the op's arguments as fake tensors and returns fake outputs of the right shape, dtype, stride and device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOp:
    """A fake kernel for one foreign op. op: qualified name, `library::name`. rule: computes output metadata.

    samples: device -> calls, arguments by their names in the op's schema; on these the conformance suite compares the
    fake with the real op, and without them it can't.
    """

    op: str
    rule: ShapeRule
    samples: Callable[[torch.device], Iterable[Sample]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeResult:
    """Whether a declared fake was registered, and the reason in one line either way."""

    applied: bool
    reason: str


def like(argument: int = 0) -> ShapeRule:
    """Return the rule "one output with the metadata of argument number `argument`"."""

    def rule(*args: Any, **_: Any) -> torch.Tensor:
        return torch.empty_like(args[argument])

    return rule


def half_last(argument: int = 0) -> ShapeRule:
    """Return the rule "like argument number `argument`, with half its last dimension" (gated activations)."""

    def rule(*args: Any, **_: Any) -> torch.Tensor:
        tensor: torch.Tensor = args[argument]
        return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] // 2))

    return rule


def nothing(*_: Any, **__: Any) -> None:
    """Be the rule of ops that only write into their arguments."""
    return None


_APPLIED: set[str] = set()


def apply_fakes(declarations: Iterable[FakeOp]) -> tuple[tuple[FakeOp, FakeResult], ...]:
    """Register each declared fake whose op exists and has none yet, and say what became of each."""
    return tuple((fake, _apply(fake)) for fake in declarations)


def _apply(fake: FakeOp) -> FakeResult:
    library, _, name = fake.op.partition("::")
    if not library or not name:
        raise PluginError(
            f"fake kernel for {fake.op!r}", found="not a qualified op name", remedy="write it as 'library::op'"
        )
    if fake.op in _APPLIED:
        return FakeResult(applied=True, reason="registered earlier in this process")
    packet = getattr(getattr(torch.ops, library), name, None)
    if packet is None:
        return FakeResult(applied=False, reason=f"op {fake.op} is not installed here")
    if has_fake(fake.op):
        return FakeResult(applied=False, reason=f"op {fake.op} brings a fake kernel of its own")
    torch.library.register_fake(fake.op, fake.rule)
    _APPLIED.add(fake.op)
    return FakeResult(applied=True, reason="registered")


def has_fake(op: str) -> bool:
    """Return whether `library::name` can already run on fake tensors (Meta kernel, Python fake, or composite)."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has_kernel(op, key) for key in ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")):
        return True
    entry = torch._library.simple_registry.singleton.find(op)
    return entry.fake_impl.kernel is not None
