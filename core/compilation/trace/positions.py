"""Tensors that a call names, as in `torch.exp(input=x)`, are given by position: passes look for them there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
from torch import fx
from torch.fx.operator_schemas import get_signature_for_torch_op

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def by_position(graph: fx.Graph) -> None:
    """Move named tensors, and lists of them, to the positions that torch's signatures give their names.

    A call keeps the rest as it stands: options such as `dim`, and tensors behind a parameter that it leaves out.
    """
    for node in graph.nodes:
        if not node.kwargs or node.op not in ("call_function", "call_method"):
            continue
        given, named = list(node.args), dict(node.kwargs)
        function = node.target if node.op == "call_function" else getattr(torch, str(node.target), None)
        for name in _names(function, frozenset(named))[len(given) :] if callable(function) else ():
            if not _holds_tensors(named.get(name)):
                break
            given.append(named.pop(name))
        if len(given) > len(node.args):
            node.args, node.kwargs = tuple(given), named


def _holds_tensors(value: Any) -> bool:
    each = value if isinstance(value, (list, tuple)) else (value,)
    return bool(each) and all(isinstance(part, fx.Node) for part in each)


@lru_cache(maxsize=1024)
def _names(function: Callable[..., Any], named: frozenset[str]) -> tuple[str, ...]:
    """Return the names of a function's positional parameters, as far as all its forms agree that have these."""
    signatures = get_signature_for_torch_op(function)  # also those of torch's builtin functions, which Python has not
    if not signatures:
        try:
            signatures = [inspect.signature(function)]
        except (TypeError, ValueError):
            return ()
    forms = [each.parameters for each in signatures if named <= each.parameters.keys()]
    orders = [[name for name, each in form.items() if each.kind in _BY_POSITION] for form in forms]
    agreed = takewhile(lambda names: len(set(names)) == 1, zip(*orders, strict=False))
    return tuple(names[0] for names in agreed)
