"""Declared inputs and buckets: what a program may be called with, and which key serves a call."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, prod
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey, KeyGuards
from core.compilation.capture.guards import GuardValues, check_call, guards_per_phase
from core.errors import UsageError

Padding = Literal["zero", "sentinel", "edge", "keep", "copy", "bound"]
"""What the rows of a bucket past the real input hold.

- zero, sentinel: 0, or the spec's `value`, written at each call
- edge: the last real row
- keep: whatever was there
- copy: there are none, since the input must fill its bucket exactly
- bound: there are none, since nothing is copied: graphs read and write the caller's own tensor (a cache), which is
  given at compile
"""

_DIM = re.compile(r"([A-Za-z_]\w*)(?:\s*\+\s*(\d+))?")
Buckets = Mapping[str, Sequence["int | Mapping[str, int]"]] | Sequence["int | Mapping[str, int]"]
"""Sizes of the one bucket dimension, or by dimension for each bucket; a list of these for each phase; or, under the
names of all dimensions, the sizes of each, which are combined each with each. Names by which models or modes are
given are phases."""
RESERVED = frozenset({"guards", "step"})
DEFAULT_PHASE = "main"


@dataclass(frozen=True)
class InputSpec:
    """One input of a program.

    A named dimension is filled up to the bucket's size: naming it states that the model treats its entries
    independently or masks them itself. A mean or an unmasked softmax over it would include the padding.
    """

    #: Ints, or bucket dimensions by name (`"tokens"`, `"seqs + 1"`).
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    #: What rows past the real input hold.
    padding: Padding = "zero"
    #: The number that padding "sentinel" writes; the dtype must hold it. No other padding takes one.
    value: int | float = 0

    def __post_init__(self) -> None:
        if self.padding not in get_args(Padding):
            raise UsageError(
                f"padding {self.padding!r}",
                found="no policy of that name",
                remedy=f"choose one of: {', '.join(get_args(Padding))}",
            )
        if not isinstance(self.dtype, torch.dtype) or not isinstance(self.shape, tuple):
            raise UsageError(
                f"InputSpec({self.shape!r}, {self.dtype!r})",
                found="a shape is a tuple and a dtype a torch.dtype",
                remedy='write it like InputSpec(("batch", 64), torch.float32)',
            )
        for dim in self.shape:
            if not (_DIM.fullmatch(dim) if isinstance(dim, str) else isinstance(dim, int) and dim >= 0):
                raise UsageError(
                    f"input dimension {dim!r}",
                    found="it is neither an int nor 'name' nor 'name + int', or it is negative",
                    remedy="name a bucket dimension, for example 'tokens' or 'seqs + 1'",
                )
        self._check_value()

    def _check_value(self) -> None:
        if not isinstance(self.value, (int, float)) or not _holds(self.dtype, self.value):
            raise UsageError(
                f"InputSpec(…, {self.dtype}, value={self.value!r})",
                found="no number of that dtype",
                remedy="give a number that the dtype can hold, or declare another dtype",
            )
        if self.padding != "sentinel" and self.value != 0:
            raise UsageError(
                f"InputSpec(…, padding={self.padding!r}, value={self.value!r})",
                found="only padding 'sentinel' writes a value",
                remedy="add padding='sentinel', or leave the value out",
            )

    def dims(self) -> tuple[str, ...]:
        """Return the bucket dimensions this input uses, in order of appearance."""
        return tuple(dict.fromkeys(_parse(d)[0] for d in self.shape if isinstance(d, str)))

    def offset(self, dim: int) -> int:
        """Return the number that dimension `dim` adds to a bucket dimension (1 for "seqs + 1"), else 0."""
        declared = self.shape[dim]
        return _parse(declared)[1] if isinstance(declared, str) else 0

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape for these sizes of the bucket dimensions."""
        return tuple(d if isinstance(d, int) else sizes[_parse(d)[0]] + _parse(d)[1] for d in self.shape)

    def measure(self, name: str, shape: Sequence[int], sizes: dict[str, int]) -> None:
        """Add the bucket dimensions that an actual shape implies to `sizes`; raise `UsageError` if two of them
        disagree."""
        fits = len(shape) == len(self.shape)
        for declared, actual in zip(self.shape, shape, strict=False):
            if isinstance(declared, int):
                fits = fits and declared == actual
            else:
                dim, offset = _parse(declared)
                fits = fits and actual >= offset and sizes.setdefault(dim, actual - offset) == actual - offset
        if not fits:
            known = ", ".join(f"{k} = {v}" for k, v in sizes.items())
            raise UsageError(
                f"input {name!r} of shape {tuple(shape)}",
                found=f"the program declares {self.shape}" + (f", and here {known}" if known else ""),
                remedy="pass tensors of the declared shapes, with equal sizes where names are equal",
            )

    def padded(self, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """Return the tensor filled up to these sizes of the bucket dimensions, by the declared padding."""
        shape = self.resolve(sizes)
        if tuple(tensor.shape) == shape:
            return tensor
        kept = tuple(slice(size) for size in tensor.shape)
        result = torch.full(shape, self.value if self.padding == "sentinel" else 0, dtype=self.dtype).to(tensor.device)
        if self.padding == "edge" and tensor.numel():
            result.copy_(tensor[tuple(slice(-1, None) for _ in shape)].expand(shape))
        result[kept] = tensor
        return result


def _holds(dtype: torch.dtype, value: int | float) -> bool:
    """Return whether a dtype can hold this number; a floating dtype may round it."""
    if value == 0:
        return True
    special = value != value or abs(value) == inf
    if dtype.is_floating_point or dtype.is_complex:
        return special or abs(value) <= torch.finfo(dtype).max
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return not special and value == int(value) and low <= value <= high


def _combined(sizes: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return the buckets that hold each size of a dimension with each of the others; an int is a list of one."""
    lists = [[each] if isinstance(each, int) else each for each in sizes.values()]
    if not all(isinstance(each, Sequence) and not isinstance(each, str) and each for each in lists):
        raise UsageError(
            f"buckets={dict(sizes)!r}",
            found="not a list of sizes for each dimension",
            remedy=f"write it like buckets={ {name: [1, 8] for name in sizes}!r}",
        )
    return [dict(zip(sizes, each, strict=True)) for each in product(*lists)]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _parse(dim: str) -> tuple[str, int]:
    match = _DIM.fullmatch(dim)
    assert match is not None, dim  # checked when the spec was made
    return match[1], int(match[2] or 0)


@dataclass(frozen=True)
class BucketTable:
    """All buckets of a program."""

    #: Names of the bucket dimensions, in the order of a key's sizes.
    dims: tuple[str, ...]
    #: The keys of each phase, from small to large.
    phases: Mapping[str, tuple[GraphKey, ...]]
    #: The guards of each phase, with the values that it is captured for.
    guards: Mapping[str, GuardValues] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def build(
        cls,
        inputs: Mapping[str, InputSpec],
        buckets: Buckets | None,
        guards: GuardValues | Mapping[str, GuardValues] | None = None,
        *,
        phases: Collection[str] = (),
    ) -> BucketTable:
        """Check the caller's buckets and normalise them. `buckets=None` means one bucket without dimensions.

        phases: those that the caller's other arguments name, which tell phases from dimensions of the same names.
        """
        for name, spec in inputs.items():
            if name in RESERVED:
                raise UsageError(
                    f"an input named {name!r}",
                    found="calls of a program have an argument of that name",
                    remedy="give the model's parameter another name, or wrap it in a function",
                )
            if not isinstance(spec, InputSpec):
                raise UsageError(
                    f"input {name!r}",
                    found=f"it is declared by a {type(spec).__name__}",
                    remedy='declare shape and dtype: InputSpec(("batch", 64), torch.float32)',
                )
        dims = tuple(dict.fromkeys(d for spec in inputs.values() for d in spec.dims()))
        if buckets is None and dims:
            raise UsageError(
                "compiling without buckets",
                found=f"the inputs have the bucket dimensions {', '.join(dims)}",
                remedy=f"say which sizes to capture: buckets=[{dict.fromkeys(dims, 8)!r}]",
            )
        if buckets is None:
            buckets = [{}]
        by_phase = isinstance(buckets, Mapping) and bool(phases) and set(phases) <= set(buckets)
        if isinstance(buckets, Mapping) and dims and set(buckets) == set(dims) and not by_phase:
            buckets = _combined(buckets)
        if not isinstance(buckets, Mapping):
            buckets = {DEFAULT_PHASE: buckets}
        if not buckets:
            raise UsageError("an empty mapping of buckets", found="no phase", remedy="name at least one phase")
        per_phase = guards_per_phase({} if guards is None else guards, tuple(buckets), inputs)
        keys = {phase: cls._keys(phase, dims, entries, per_phase[phase]) for phase, entries in buckets.items()}
        return cls(dims, keys, per_phase)

    @staticmethod
    def _keys(phase: str, dims: tuple[str, ...], entries: object, guards: GuardValues) -> tuple[GraphKey, ...]:
        if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
            raise UsageError(
                f"buckets {entries!r} of phase {phase!r}",
                found="not a list of at least one bucket",
                remedy="give a list of sizes, or one list per phase, for example {'decode': [8, 16]}",
            )
        conditions = [
            tuple(zip(sorted(guards), values, strict=True))
            for values in product(*map(guards.__getitem__, sorted(guards)))
        ]
        found: set[tuple[int, ...]] = set()
        for entry in entries:
            sizes = {dims[0]: entry} if isinstance(entry, int) and len(dims) == 1 else entry
            if not isinstance(sizes, Mapping) or set(sizes) != set(dims) or not all(map(_is_size, sizes.values())):
                named = isinstance(sizes, Mapping) and set(sizes) == set(dims)
                raise UsageError(
                    f"bucket {entry!r} of phase {phase!r}",
                    found="a size is a whole number above 0"
                    if named
                    else f"the inputs' bucket dimensions are: {', '.join(dims) or 'none'}",
                    remedy=f"give one positive size per dimension: buckets=[{dict.fromkeys(dims, 8)!r}]"
                    if dims
                    else "leave `buckets` out: every input has a fixed shape",
                )
            found.add(tuple(sizes[d] for d in dims))
        ordered = sorted(found, key=lambda sizes: (prod(sizes), sizes))
        return tuple(GraphKey(phase, sizes, condition) for sizes in ordered for condition in conditions)

    def sizes(self, key: GraphKey) -> dict[str, int]:
        """Return the key's dimensions by name."""
        return dict(zip(self.dims, key.dims, strict=True))

    def find(self, phase: str, sizes: Mapping[str, int], guards: KeyGuards = ()) -> GraphKey | None:
        """Return the smallest bucket of the phase that holds these sizes under exactly these guards, or None."""
        wanted = tuple(sizes[d] for d in self.dims)
        keys = (key for key in self.phases[phase] if key.guards == guards)
        return next((k for k in keys if all(a >= b for a, b in zip(k.dims, wanted, strict=True))), None)

    def without(self, keys: Container[GraphKey]) -> BucketTable:
        """Return the table without these keys; a phase may then have none."""
        phases = {phase: tuple(key for key in each if key not in keys) for phase, each in self.phases.items()}
        return replace(self, phases=phases)

    def check_guards(self, phase: str, guards: Mapping[str, Hashable]) -> KeyGuards:
        """Return the guards of a call in the form of a key; raise `UsageError` unless they are those declared for the
        phase."""
        return check_call(phase, self.guards.get(phase, {}), guards)
