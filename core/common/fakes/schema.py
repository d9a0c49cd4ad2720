"""What an op's schema says, and where a declared fake contradicts it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C import FunctionSchema
from torch._ops import OpOverload, OpOverloadPacket

from core.common.fakes.declaration import FakeOp
from core.common.fakes.rules import Rule
from core.common.fakes.sizes import Key, Need, shown

_KINDS: Mapping[Need, frozenset[str]] = {
    "tensor": frozenset({"Tensor"}),
    "int": frozenset({"int", "SymInt"}),
    "bool": frozenset({"bool"}),
    "dtype": frozenset({"Tensor", "ScalarType"}),
}


def find_overload(op: str) -> OpOverload | None:
    """Return the overload that `library::name` or `library::name.overload` names, None where there is none.

    Without an overload's name it is the default one, or the first where no default exists.
    """
    library, _, name = op.partition("::")
    name, _, chosen = name.partition(".")
    packet = getattr(getattr(torch.ops, library), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    overloads = packet.overloads()
    wanted = chosen or ("default" if "default" in overloads else overloads[0])
    if wanted not in overloads:
        return None
    overload: OpOverload = getattr(packet, wanted)
    return overload


def mutated(schema: FunctionSchema) -> tuple[str, ...]:
    """Return the names of the arguments that the schema says are written."""
    return tuple(each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write)


def shared(schema: FunctionSchema, num_results: int | None = None) -> frozenset[tuple[int, str]]:
    """Return which result, by number, may share memory with which argument, according to the schema.

    num_results: how many tensors a call returned; more than the schema has results if one of them is a list.
    """
    numbers = range(len(schema.returns) if num_results is None else num_results)
    found = set()
    for each in schema.arguments:
        if each.alias_info is None:
            continue
        if "*" in each.alias_info.after_set:  # an element of a list of results
            found |= {(number, each.name) for number in numbers}
        for number, result in enumerate(schema.returns):
            if result.alias_info is not None and result.alias_info.before_set & each.alias_info.before_set:
                found.add((number, each.name))
    return frozenset(found)


def returned(schema: FunctionSchema) -> str:
    """Return the results as the schema writes them."""
    return str(schema).rpartition(" -> ")[2]


def mismatch(fake: FakeOp, schema: FunctionSchema) -> str:
    """Say where a declared fake does not fit the op's schema, as "expected; found"; "" if it fits."""
    names = [each.name for each in schema.arguments]
    said = (*(fake.writes or ()), *(() if fake.changes else fake.also_writes))
    unknown = [name for name in said if name not in names]
    if unknown:
        return f"it says that the op writes {', '.join(unknown)}; the op has {', '.join(names) or 'no arguments'}"
    if fake.writes is not None and set(fake.writes) != set(mutated(schema)):
        found = ", ".join(mutated(schema)) or "nothing"
        return f"it says that the op writes {', '.join(fake.writes) or 'nothing'}; the schema says {found}"
    if fake.rule is None:
        return ""
    if isinstance(fake.rule, Rule):
        return _arguments(fake.rule, schema) or _results(fake.rule, schema)
    return _signature(fake.rule, schema)


def _arguments(rule: Rule, schema: FunctionSchema) -> str:
    """Name an argument that the rule reads and the op lacks or has with another type."""
    for key, need in rule.needs():
        index = _index(key, schema)
        if index is None:
            names = ", ".join(each.name for each in schema.arguments)
            return f"its rule reads {shown(key)}; the op has {names or 'no arguments'}"
        kind = str(schema.arguments[index].real_type)
        if kind.removeprefix("Optional[").removesuffix("]") not in _KINDS[need]:
            return f"its rule reads {shown(key)} as {need}; the schema has it as {kind}"
    return ""


def _results(rule: Rule, schema: FunctionSchema) -> str:
    """Say where the number of results or their aliases differ from the schema."""
    odd = [each for each in schema.returns if str(each.real_type) != "Tensor"]
    if odd:
        return f"its rule gives tensors; the op returns {returned(schema)} (write the rule as a function)"
    if len(rule.outputs) != len(schema.returns):
        return f"its rule gives {_count(len(rule.outputs))}; the op returns {returned(schema)}"
    declared = shared(schema)
    for number, output in enumerate(rule.outputs):
        said = {name for result, name in declared if result == number}
        key = output.returns
        name = None if key is None else schema.arguments[_index(key, schema) or 0].name
        if name is not None and name not in said:
            return f"its rule says that result {number} is {name} itself; the schema says new memory: {schema}"
        if name is None and said:
            return f"its rule gives result {number} new memory; the schema says that of {' or '.join(sorted(said))}"
    return ""


def _count(number: int) -> str:
    return {0: "no result", 1: "one result"}.get(number, f"{number} results")


def _signature(rule: Callable[..., Any], schema: FunctionSchema) -> str:
    """Name a way of calling the op that a fake given as a function does not accept."""
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):  # built in
        return ""
    everything = list(schema.arguments)
    # The dispatcher leaves out trailing arguments that equal their defaults.
    for arguments in (everything, [each for each in everything if not each.has_default_value()]):
        try:
            signature.bind(
                *(None for each in arguments if not each.kwarg_only),
                **{each.name: None for each in arguments if each.kwarg_only},
            )
        except TypeError as error:
            called = ", ".join(each.name for each in arguments)
            return f"its rule takes {signature}; the op is called with ({called}): {error}"
    return ""


def as_kernel(rule: Rule, schema: FunctionSchema) -> Callable[..., Any]:
    """Return the rule as a kernel for the dispatcher, which leaves out arguments that equal their defaults."""
    names = [each.name for each in schema.arguments]
    positional = [each.name for each in schema.arguments if not each.kwarg_only]
    defaults = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}

    def fake(*args: Any, **kwargs: Any) -> Any:
        named = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        values: dict[Key, Any] = {names.index(name): value for name, value in named.items()}
        values.update(named)
        return rule.on(values)

    return fake


def _index(key: Key, schema: FunctionSchema) -> int | None:
    names = [each.name for each in schema.arguments]
    if isinstance(key, str):
        return names.index(key) if key in names else None
    return key if 0 <= key < len(names) else None
