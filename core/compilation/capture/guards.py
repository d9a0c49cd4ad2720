"""Guards: what a phase is captured for besides its sizes, as plain Python values."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from core.common.graphs.backend import KeyGuards
from core.errors import UsageError

GuardValues = Mapping[str, Sequence[Hashable]]
"""Name of a guard -> the values that a phase is captured for; the model gets each by name."""
_EXAMPLE = "guards={'lora': (False, True)}"


def guards_per_phase(guards: object, phases: tuple[str, ...], inputs: Collection[str]) -> dict[str, GuardValues]:
    """Return the guards of each phase, given for all phases or per phase; raise `UsageError` for values that can't be.

    inputs: names that no guard may have.
    """
    if not isinstance(guards, Mapping):
        raise UsageError(
            f"guards={guards!r}",
            found=f"a {type(guards).__name__}",
            remedy=f"give a mapping from name to values: {_EXAMPLE}",
        )
    nested = any(isinstance(value, Mapping) for value in guards.values())
    if nested and not guards.keys() <= set(phases):
        raise UsageError(
            f"guards for phases {sorted(map(str, guards.keys() - set(phases)))}",
            found=f"the buckets name the phases {sorted(phases)}",
            remedy=f"name only these, or give one mapping for all: {_EXAMPLE}",
        )
    if nested and not all(isinstance(value, Mapping) for value in guards.values()):
        raise UsageError(
            f"guards={guards!r}",
            found="some phases have a mapping, others none",
            remedy="give each phase that has guards a mapping from name to values, and leave the others out",
        )
    found: dict[str, GuardValues] = {phase: dict(guards.get(phase, {}) if nested else guards) for phase in phases}
    for values in found.values():
        for name, each in values.items():
            _check_values(name, each, inputs)
    return found


def check_call(phase: str, declared: GuardValues, guards: Mapping[str, Hashable]) -> KeyGuards:
    """Return the guards of a call as a key holds them.

    Raises `UsageError` unless they are exactly the declared guards, each of the type that it was captured with: equal
    values find the same graph, so `1` would run the graph of `True`.
    """
    if guards.keys() != declared.keys():
        raise UsageError(
            f"calling phase {phase!r} with guards {sorted(guards)}",
            found="it was compiled with: " + (", ".join(f"{n} in {list(v)}" for n, v in declared.items()) or "none"),
            remedy="give exactly these: program(phase, guards={name: value}, …)",
        )
    for name, value in guards.items():
        if isinstance(value, Tensor):
            raise _tensor(f"calling phase {phase!r} with guard {name!r}")
        alike = [known for known in declared[name] if known == value and type(known) is not type(value)]
        if alike:
            raise UsageError(
                f"calling phase {phase!r} with guard {name!r} of {value!r}, a {type(value).__name__}",
                found=f"it was compiled with {alike[0]!r}, a {type(alike[0]).__name__}, which is equal to it",
                remedy=f"give the value of that type: guards={{{name!r}: {alike[0]!r}}}",
            )
    return tuple(sorted(guards.items()))


def _check_values(name: Any, values: Any, inputs: Collection[str]) -> None:
    if isinstance(values, str):
        raise UsageError(
            f"guard {name!r} with values {values!r}",
            found="a single string",
            remedy=f"give a sequence of values: guards={{{name!r}: ({values!r},)}}",
        )
    if not isinstance(name, str) or not isinstance(values, Sequence) or not values or name in inputs:
        found = "not a sequence of at least one value" if isinstance(name, str) else "its name is no string"
        raise UsageError(
            f"guard {name!r} with values {values!r}",
            found="an input has that name" if name in inputs else found,
            remedy=f"give each guard a name of its own and its values, Python constants: {_EXAMPLE}",
        )
    for value in values:
        if isinstance(value, Tensor):
            raise _tensor(f"guard {name!r} with a tensor among its values")
        try:
            hash(value)
        except TypeError:
            raise UsageError(
                f"guard {name!r} with value {value!r}",
                found=f"a {type(value).__name__} can't be hashed, and graphs are found by the value",
                remedy="give Python constants: strings, numbers, None, or tuples of these",
            ) from None
    for one, other in combinations(values, 2):
        if one == other:
            raise UsageError(
                f"guard {name!r} with values {values!r}",
                found=f"{one!r} and {other!r} are equal, so one graph would have to serve both",
                remedy="give values that differ, such as strings",
            )


def _tensor(asked: str) -> UsageError:
    return UsageError(
        asked,
        found="a guard decides which graph runs, so its value must be known without reading a tensor",
        remedy="give a Python constant, for example tensor.item(); or declare the tensor as an input",
    )
