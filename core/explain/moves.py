"""The bytes and operations that one call needs at least, from its arguments and results, whatever the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from core.common.ops.declaration import declared_ops

_GATHERS = ("embedding", "index_select", "gather", "getitem", "index")
"""Ops that read no more of their first (or only floating) tensor argument than they return."""
_SCATTERS = ("index_copy_", "index_put_", "scatter_", "slice_scatter", "index_add_", "setitem")
"""Ops that write only their other arguments' values into their first tensor argument."""
_CACHES = ("key_cache", "value_cache")
_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The bytes and operations that one call needs at least."""

    #: Read plus written.
    bytes: int
    #: Of matrix products with weights; 0 for other calls.
    flops: int = 0
    #: Whether the results are memory of the arguments, and nothing was written there.
    is_view: bool = False


def moved(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Moved:
    """Return what a call must move: every argument once and every result once.

    Less counts of four kinds of arguments: of a paged cache what the context holds, of experts those that the tokens
    can hit, of a table the rows looked up, of a broadcast tensor what it stores. op: as `core.explain.nodes.op_name`
    names it.
    """
    declared = declared_ops().get(op)
    if declared is not None:
        named = declared.bind(args, kwargs).args
        return Moved(bytes=_canonical_bytes(named, result), flops=_canonical_flops(named))
    name = _short(op)
    tensors = _tensors((args, dict(kwargs)))
    results = _tensors(result)
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    shared = all(tensor.untyped_storage().data_ptr() in known for tensor in results)
    if shared and not name.endswith("_") and name not in _SCATTERS:
        return Moved(bytes=0, is_view=True)
    if name in _GATHERS and tensors:
        # In torch.nn.functional the ids come before the table, in ATen after it.
        table = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
        rest = sum(_stored(tensor) for tensor in tensors if tensor is not table)
        return Moved(bytes=rest + 2 * sum(map(_stored, results)))
    if name in _SCATTERS and tensors:
        return Moved(bytes=2 * sum(map(_stored, tensors[1:])))
    flops = 0
    if name == "linear" and len(tensors) >= 2:
        flops = _product(tensors[0], tensors[1])
    elif name in ("mm", "addmm", "matmul", "bmm") and len(tensors) >= 2:
        flops = 2 * sum(map(Tensor.numel, results)) * tensors[-2].shape[-1]
    return Moved(bytes=sum(map(_stored, {id(t): t for t in (*tensors, *results)}.values())), flops=flops)


def _canonical_bytes(named: Mapping[str, Any], result: Any) -> int:
    total = sum(map(_stored, _tensors(result)))
    for name, value in named.items():
        if name in _CACHES and isinstance(value, Tensor):
            total += _cache_bytes(value, named)
        else:
            total += round(sum(map(_stored, _tensors(value))) * (_hit(named) if name in _EXPERTS else 1.0))
    # The new keys and values are written once more: into the cache.
    if any(isinstance(named.get(name), Tensor) for name in _CACHES):
        total += sum(_stored(value) for name in ("key", "value") if isinstance(value := named.get(name), Tensor))
    return total


def _cache_bytes(cache: Tensor, named: Mapping[str, Any]) -> int:
    """Return the bytes read of a cache: for the paged one (N, P, K, D) the sequences' part, for another one all of
    it."""
    lens = named.get("seq_lens")
    if not isinstance(lens, Tensor):
        return _stored(cache)
    window = int(named.get("window") or 0)
    starts = named.get("query_starts")
    seen = lens.to("cpu")
    if window:
        seen = ((seen - 1) % window + 1) * (seen > 0) if named.get("chunked") else seen.clamp(max=window)
    held = int(seen.sum())
    if isinstance(starts, Tensor):  # new positions come as arguments key and value and are not read back
        held = max(held - int(starts[-1]), 0)
    return held * cache.shape[2] * cache.shape[3] * cache.element_size()


def _canonical_flops(named: Mapping[str, Any]) -> int:
    x, weight = named.get("x"), named.get("weight")
    if isinstance(x, Tensor) and isinstance(weight, Tensor) and weight.dim() == 2:
        return _product(x, weight)
    indices, experts = named.get("indices"), [named.get(name) for name in ("gate_up", "down")]
    if isinstance(indices, Tensor):
        return sum(2 * indices.numel() * e.numel() // e.shape[0] for e in experts if isinstance(e, Tensor))
    return 0


def _hit(named: Mapping[str, Any]) -> float:
    """Return the share of the experts that the tokens of a call can hit."""
    indices, experts = named.get("indices"), named.get("gate_up")
    if not isinstance(indices, Tensor) or not isinstance(experts, Tensor):
        return 1.0
    return min(indices.numel(), experts.shape[0]) / experts.shape[0]


def _product(x: Tensor, weight: Tensor) -> int:
    return 2 * (x.numel() // max(x.shape[-1], 1)) * weight.numel()


def _stored(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor really has: a broadcast dimension has one."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _short(op: str) -> str:
    return op.removeprefix("aten.").removeprefix("aten::").partition(".")[0].lstrip(".") if op[:1] != "." else op[1:]
