"""Symbolic sizes as text: expressions over sizes of declared inputs, and the conditions that a trace has on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]

from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.trace.traced import TracedGraph

_KINDS = ("Add", "Mul", "Pow", "Mod", "Max", "Min", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not")
_NAMES = {"Equality": "Eq", "Unequality": "Ne", "StrictLessThan": "Lt", "LessThan": "Le"} | {
    "StrictGreaterThan": "Gt",
    "GreaterThan": "Ge",
}


@dataclass(frozen=True, slots=True)
class StoredGuard:
    """A condition on sizes; expr: a relation that must hold."""

    expr: Any


@dataclass(frozen=True, slots=True)
class StoredRange:
    """The largest value that a symbol may have."""

    upper: Any


@dataclass(frozen=True, slots=True)
class StoredShapes:
    """The parts of a trace's shape environment that are needed after the passes."""

    guards: tuple[StoredGuard, ...]
    var_to_range: Mapping[Any, StoredRange]
    replacements: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class _Expression:
    expr: Any


@dataclass(frozen=True, slots=True)
class StoredSize:
    """A symbolic size; reads like a `torch.SymInt`."""

    node: _Expression


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """The shape of a graph's output, in place of the fake tensor."""

    shape: tuple[int | StoredSize, ...]


def encode_expression(expression: Any) -> Any:
    """Return a sympy expression as JSON: a number, `{"size": name}` or `[function, arguments…]`."""
    if expression is sympy.true or expression is sympy.false or isinstance(expression, bool):
        return bool(expression)
    if isinstance(expression, (int, sympy.Integer)):
        return int(expression)
    if isinstance(expression, sympy.Rational):
        return ["Rational", int(expression.p), int(expression.q)]
    if isinstance(expression, sympy.Symbol):
        return {"size": expression.name}
    kind = type(expression).__name__
    kind = _NAMES.get(kind, kind)
    if not expression.args or (kind not in _KINDS and _function(kind) is None):
        raise Uncacheable(f"a size is {expression}, which holds a {kind}")
    return [kind, *map(encode_expression, expression.args)]


def decode_expression(text: Any, symbols: Mapping[str, Any]) -> Any:
    """Return the expression that `encode_expression` wrote, over these symbols."""
    if isinstance(text, bool):
        return sympy.true if text else sympy.false
    if isinstance(text, int):
        return sympy.Integer(text)
    if isinstance(text, dict):
        return symbols[text["size"]]
    kind, *arguments = text
    if kind == "Rational":
        return sympy.Rational(*arguments)
    function = getattr(sympy, kind) if kind in _KINDS and _function(kind) is None else _function(kind)
    if function is None:
        raise ValueError(f"no function {kind!r} of sizes")
    return function(*(decode_expression(each, symbols) for each in arguments))


def checked_expression(expression: Any, symbols: Mapping[str, Any]) -> Any:
    """Encode an expression; raise `Uncacheable` unless it reads back as the same."""
    text = encode_expression(expression)
    if decode_expression(text, symbols) != expression:
        raise Uncacheable(f"the size {expression} does not read back as itself")
    return text


def _function(kind: str) -> Any:
    from torch.utils._sympy import functions

    return getattr(functions, kind, None) if kind in functions.__all__ else None


def make_symbol(name: str, assumptions: Mapping[str, bool]) -> Any:
    """Return the symbol of that name."""
    return sympy.Symbol(name, **assumptions)


def encode_size(size: Any, symbols: Mapping[str, Any]) -> Any:
    """Return a size of an output, symbolic or not, as JSON; raise `Uncacheable` where it has no form."""
    expression = getattr(getattr(size, "node", None), "expr", size)
    return checked_expression(expression, symbols)


def decode_output(shape: Sequence[Any], symbols: Mapping[str, Any]) -> Any:
    """Return an output's shape from the sizes that `encode_size` wrote, for `TracedGraph.crop` to read."""
    decoded = (decode_expression(size, symbols) if not isinstance(size, int) else size for size in shape)
    return StoredOutput(tuple(map(_stored_size, decoded)))


def _stored_size(size: Any) -> int | StoredSize:
    return size if isinstance(size, int) else StoredSize(_Expression(size))


def encode_symbol(symbol: Any, traced: TracedGraph) -> dict[str, Any]:
    """Return a symbol of a graph with its assumptions, the input whose size it is, and its range."""
    slot, bounds = traced.symbols[symbol], traced.shape_env.var_to_range.get(symbol)
    upper: Any = None if bounds is None else bounds.upper
    bounded = isinstance(upper, int) or getattr(upper, "is_Integer", False)
    return {
        "name": symbol.name,
        "assumptions": _assumptions(symbol),
        "input": slot.name,
        "dim": slot.dim,
        "least": traced.least[symbol],
        "most": int(upper) if bounded else None,
    }


def _assumptions(symbol: Any) -> dict[str, Any]:
    return {key: value for key, value in sorted(symbol.assumptions0.items()) if key in ("integer", "positive")}


def encode_conditions(traced: TracedGraph, symbols: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions of a trace on its sizes; raise `Uncacheable` for a condition on a size that no input
    has."""
    if traced.shape_env is None:
        return {"guards": [], "replacements": {}}
    known = set(symbols.values())
    replaced = {s: r for s, r in traced.shape_env.replacements.items() if s in known}
    missing = {each for r in replaced.values() for each in getattr(r, "free_symbols", ())} - known
    unknown = {each for guard in traced.shape_env.guards for each in guard.expr.free_symbols} - known
    if missing | unknown:
        raise Uncacheable(f"its conditions hold sizes of no input: {sorted(map(str, missing | unknown))}")
    guards = [checked_expression(guard.expr, symbols) for guard in traced.shape_env.guards]
    return {
        "guards": guards,
        "replacements": {s.name: checked_expression(r, symbols) for s, r in replaced.items()},
    }


def decode_conditions(text: Mapping[str, Any], symbols: Mapping[str, Any]) -> StoredShapes:
    """Return the conditions that `encode_conditions` wrote, and the ranges of a graph's symbols."""
    return StoredShapes(
        guards=tuple(StoredGuard(decode_expression(each, symbols)) for each in text["guards"]),
        var_to_range={symbols[each["name"]]: StoredRange(_upper(each["most"])) for each in text["symbols"]},
        replacements={symbols[name]: decode_expression(each, symbols) for name, each in text["replacements"].items()},
    )


def _upper(most: int | None) -> Any:
    return float("inf") if most is None else most
