"""Tensors that a call of torch names, as in `torch.exp(input=x)`, are given by position: passes look for them there."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.operator_schemas import get_signature_for_torch_op

from core.common.node_meta import value_of

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OF_NUMPY = {"x": "input", "a": "input", "x1": "input", "x2": "other", "axis": "dim", "keepdims": "keepdim"}
"""Names that torch's functions take as NumPy's do (torch/csrc/utils/python_arg_parser.cpp)."""


def by_position(graph: fx.Graph) -> None:
    """Move named tensors, and lists of them, to the positions that torch's signatures give their names.

    A call keeps the rest as it stands: options such as `dim`, tensors behind a parameter that it leaves out, and all of
    it where other things than tensors stand in front. Ops of libraries stay: which of their overloads is meant may
    depend on a name.
    """
    for node in graph.nodes:
        if node.kwargs and (function := _function(node)) is not None and all(map(_holds_tensors, node.args)):
            _move(node, function)


def _function(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function of torch that a node calls, also by a method of its name."""
    if node.op == "call_method":
        return getattr(torch, str(node.target), None)
    target: Any = node.target if node.op == "call_function" else None
    own = isinstance(target, types.FunctionType) and target.__module__ in ("torch.nn.functional", "torch.functional")
    return target if own or isinstance(target, types.BuiltinFunctionType) else None


def _move(node: fx.Node, function: Callable[..., Any]) -> None:
    given, named = list(node.args), dict(node.kwargs)
    signatures = _signatures(function)
    if not any(named.keys() <= each.keys() for each in signatures):
        named = {_OF_NUMPY.get(name, name): value for name, value in named.items()}
    names = _agreed([each for each in signatures if named.keys() <= each.keys()])
    for name in names[len(given) :]:
        if not _holds_tensors(named.get(name)):
            break
        given.append(named.pop(name))
    if names:
        node.args, node.kwargs = tuple(given), named


def _holds_tensors(value: Any) -> bool:
    each = value if isinstance(value, (list, tuple)) else (value,)
    return bool(each) and all(isinstance(part, fx.Node) and isinstance(value_of(part), Tensor) for part in each)


@lru_cache(maxsize=1024)
def _signatures(function: Callable[..., Any]) -> list[dict[str, bool]]:
    """Return the forms of a function: the names of its parameters, each with whether it may be given by position."""
    found = get_signature_for_torch_op(function)  # also those of torch's builtin functions, which Python has not
    if not found:
        try:
            found = [inspect.signature(function)]
        except (TypeError, ValueError):
            return []
    return [{name: each.kind in _BY_POSITION for name, each in form.parameters.items()} for form in found]


def _agreed(forms: Sequence[dict[str, bool]]) -> tuple[str, ...]:
    """Return the names of positional parameters, as far as all forms agree on them."""
    orders = [[name for name, is_positional in form.items() if is_positional] for form in forms]
    agreed = takewhile(lambda names: len(set(names)) == 1, zip(*orders, strict=False))
    return tuple(names[0] for names in agreed)
