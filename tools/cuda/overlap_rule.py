"""What a compiled kernel owes the kernels that it overlaps with: the rule of `core_cuda.ops.launching`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ptx_paths import UNKNOWN, EarlyRead, analyse

_SCRATCH = 2
"""Parameters that Triton adds after a kernel's own: for scratch memory, and for that of profilers."""


def overlap(kernel: Any, made: Any, before: str) -> dict[str, Any]:
    """Return what a kernel reads early ("early": argument to why it may) and what it does wrong ("faults").

    kernel: the function of Triton, whose module may have `READ_EARLY`; made: that function compiled; before: the name
    of the kernel that was launched before it.
    """
    allowed = kernel.fn.__globals__.get("READ_EARLY", {}).get(kernel.__name__, {})
    descriptors = getattr(made.metadata, "tensordesc_meta", None) or ()
    names = list(parameters(made.src.signature, descriptors))
    return judged(made.asm["ptx"], names, allowed, before) | {"declared": sorted(allowed)}


def judged(ptx: str, names: list[str], allowed: Mapping[str, Any], before: str) -> dict[str, Any]:
    """Return the same of a kernel's PTX and the arguments that its parameters come from, in order."""
    code, found = analyse(ptx)
    if len(code.parameters) != len(names) + _SCRATCH:
        raise ValueError(f"{code.name} has {len(code.parameters)} parameters, and {len(names)} arguments: {names}")
    faults, early = list(found.faults), {}
    for number, read in sorted(found.reads.items()):
        name = names[number] if UNKNOWN < number < len(names) else "an address that comes from no argument"
        reason = allowed.get(name)
        early[name] = "not allowed" if reason is None else reason.why
        faults += (f"{fault}: {read.example}" for fault in _faults(name, read, reason, before))
    return {"early": early, "faults": faults}


def _faults(name: str, read: EarlyRead, reason: Any, before: str) -> Iterator[str]:
    """Yield what is wrong about a read through an argument."""
    if reason is None:
        yield f"reads through {name} before the wait, which READ_EARLY does not list"
        return
    if reason.guess and read.used and not (reason.confirmed and read.compared):
        unless = ", and compares it with nothing that it reads there again" if reason.confirmed else ""
        yield f"guesses {name} before the wait and uses that after it, in {read.used}{unless}"
    if reason.after and reason.after != before:
        yield f"reads through {name} before the wait, and follows {before or 'no kernel'}, not {reason.after}"
    if (reason.guess or reason.after) and not read.past_l1:
        yield f"reads through {name} before the wait by the L1 cache, which may keep what is out of date"


def parameters(signature: Mapping[str, Any], descriptors: Any) -> Iterator[str]:
    """Yield the argument of each parameter of a compiled kernel, as Triton's launcher lays them out.

    signature: types of Triton by argument, nested for tuples; descriptors: what Triton says of each descriptor of a
    tensor that it has made the hardware's, none if none is.
    """
    left = iter(descriptors)
    for name, kind in signature.items():
        yield from _laid_out(name, kind, left if descriptors else None)


def _laid_out(name: str, kind: Any, descriptors: Iterator[Any] | None) -> Iterator[str]:
    if isinstance(kind, tuple):
        for number, each in enumerate(kind):
            yield from _laid_out(f"{name}[{number}]", each, descriptors)
    elif kind.startswith("tensordesc"):
        dims = re.search(r"\[([^]]*)\]", kind)[1].count(",") + 1  # type: ignore[index]
        own = descriptors is not None and next(descriptors) is not None
        # The descriptor, or pointer, shape, strides and two flags; then in both cases shape and strides.
        yield from [name] * ((1 if own else 3 + 2 * dims) + 2 * dims)
    elif kind != "constexpr":
        yield name
