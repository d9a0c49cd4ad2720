"""What a call must not do beside giving right values: write what it does not declare, share memory, change metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.common.ops.attention.cache import CODES
from core.common.ops.declaration import CanonicalOp
from core.verify.fakes.memory import memory, same_bits, whole
from core.verify.fakes.parity import alias_problems, sharing
from core_conformance.trial import Trial, tensors

_PAGED = ("attention", "rotary_attention", "attention_quantize", "rotary_attention_quantize")
"""Ops that write the paged cache."""
_MOVED_ON = ("gated_delta_rule", "selective_state_update")
"""Ops that compute new states of sequences, in slots."""


def check_metadata(trial: Trial, name: str, results: Sequence[Any], fakes: Sequence[Any]) -> bool:
    """Require as many results as the fake gives, each with its shape, dtype, device type and strides."""
    if not trial.require(len(results) == len(fakes), f"{name}: {len(results)} results instead of {len(fakes)}"):
        return False
    before = len(trial.failures)
    for index, (result, fake) in enumerate(zip(results, fakes, strict=True)):
        trial.same_metadata(f"{name}, result {index} against the fake", result, fake)
    return len(trial.failures) == before


def check_writes(
    trial: Trial, name: str, mutates: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    """Require that the memory of every argument outside `mutates` holds the bits it held before the call."""
    may_change = {memory(leaf) for key in mutates for leaf in tensors(after.get(key))}
    for key, value in after.items():
        pairs = zip(tensors(value), tensors(before[key]), strict=True)
        kept = all(memory(leaf) in may_change or same_bits(whole(leaf), whole(old)) for leaf, old in pairs)
        trial.require(kept, f"{name}: writes its argument {key!r}, which the schema does not declare")


def check_aliasing(trial: Trial, name: str, results: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Require that no result shares memory with an argument or with another result."""
    nothing = frozenset[tuple[int, str]](), frozenset[tuple[int, int]]()
    problems = alias_problems(sharing(results, arguments), nothing, (), fake_decides=False)
    trial.fail(*(f"{name}: {problem}" for problem in problems))


def unread(op: CanonicalOp, kwargs: Mapping[str, Any], name: str) -> int:
    """Return how many leading blocks of a written argument may hold anything, and so are not compared."""
    if op.name not in _PAGED or name not in op.mutates:
        return 0
    # Padding tokens write the null block, block 0, several of them one slot: the order of these writes is not defined.
    page = kwargs["key_cache"].shape[1]
    return int(bool((kwargs["slot_mapping"] < page).any()))


def computed(op: CanonicalOp, kwargs: Mapping[str, Any], name: str) -> Tensor | None:
    """Return which elements of an argument the op computes, on the host; None if the op only copies its inputs there.

    Computed are rotated keys, codes of keys and values, and states that move on.
    """
    if op.name in _MOVED_ON and name in op.mutates:
        return _states_written(kwargs, kwargs[name])
    rotated = op.name.startswith("rotary") and name == "key_cache"
    if op.name not in _PAGED or name not in op.mutates or not (rotated or kwargs[name].dtype in CODES):
        return None
    cache = kwargs[name]
    found = torch.zeros(cache.shape[:2], dtype=torch.bool)
    found.view(-1)[kwargs["slot_mapping"].cpu()] = True
    return found[:, :, None, None].expand(cache.shape)


def _states_written(kwargs: Mapping[str, Any], states: Tensor) -> Tensor:
    found = torch.zeros(states.shape[:1], dtype=torch.bool)
    places = [kwargs[name] for name in ("kept", "slots") if kwargs.get(name) is not None]
    found[places[0].cpu() if places else slice(None)] = True
    return found.view(-1, *(1,) * (states.dim() - 1)).expand(states.shape)
