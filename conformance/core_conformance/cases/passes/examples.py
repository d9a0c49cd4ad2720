"""Models in which a pass must match: the examples of its declaration, else its own patterns, run as models.

A pattern says which ops it matches and not on which shapes: likely ones are tried until the pattern runs on them and
the pass matches.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.passes.declaration import Pass
from core.common.passes.patterns import InductorGraphPattern, InductorReplacement, Replacement
from core.errors import PassError
from core_conformance.cases.passes.models import SIZE, Built
from core_conformance.cases.passes.runs import Sample

_NUMBERS: tuple[tuple[Any, ...], ...] = ((2.5, 2.5, 2.5), (0.61, 1.7, 0.3), (2, 2, 2), (-1, -1, -1))
"""Numbers for a pattern's literals, taken in turn: equal ones first, since a check may require equality."""
_ROWS, _MATRIX, _HEADS = (5, SIZE), (SIZE, SIZE), (2, 4, 5, 16)
_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    (_ROWS, _ROWS),
    (_ROWS, (SIZE,)),
    (_ROWS, _MATRIX),
    (_MATRIX, _MATRIX),
    (_HEADS, _HEADS),
    ((2, *_ROWS), (SIZE,)),
    ((2, *_ROWS), _MATRIX),
)
"""Shapes for a pattern's tensors: of the first one, and of all others."""
_SCALARS = ((0.61, 2.5, 0.07), (3, 2, 5))
"""Floats and ints for the scalars of a search pattern."""
_TRIED = 20


class Pattern(nn.Module):
    """A pattern as a model: tensors in order, all other parameters fixed."""

    def __init__(self, function: Callable[..., Any], names: Sequence[str], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.function, self.names, self.fixed = function, list(names), dict(fixed)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(**dict(zip(self.names, tensors, strict=True)), **self.fixed)


def declared_samples(declared: Pass) -> list[Sample]:
    """Return the examples of a pass, each of which must give a match."""
    if declared.examples is None:
        return []
    try:
        count = len(list(declared.examples()))
    except Exception as error:
        raise PassError(
            f"the examples of pass {declared.name!r} of {declared.owner}",
            found=f"{type(error).__name__}: {error}",
            remedy="give an iterable of (module, inputs)",
        ) from error
    return [Sample(f"{declared.name} example {i}", partial(_example, declared, i), owed=True) for i in range(count)]


def _example(declared: Pass, index: int) -> Built:
    assert declared.examples is not None
    found = list(declared.examples())[index]
    try:
        module, inputs = found
        return module, _named(inputs)
    except (TypeError, ValueError) as error:
        raise PassError(
            f"example {index} of pass {declared.name!r} of {declared.owner}",
            found=f"{type(found).__name__}: {error}",
            remedy="give pairs of a module and a tuple of its positional inputs",
        ) from error


def _named(inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"x{index}": tensor for index, tensor in enumerate(inputs)}


def pattern_samples(declared: Pass) -> Iterator[list[Sample]]:
    """Yield for each pattern of a pass the models to try in turn, until the pass matches in one."""
    for index, pattern in enumerate(declared.patterns):
        name = f"{declared.name} pattern {index}"
        if isinstance(pattern, InductorReplacement):
            builds: list[Callable[[], Built]] = [partial(_searched, pattern, turn) for turn in range(2)]
        elif isinstance(pattern, Replacement):
            builds = list(_running(pattern.pattern, pattern.literals))
        else:
            builds = list(_running(_module(pattern))) if isinstance(pattern, InductorGraphPattern) else []
        yield [Sample(f"{name} try {turn}", build) for turn, build in enumerate(builds[:_TRIED])]


def example_dtypes(declared: Pass) -> frozenset[torch.dtype]:
    """Return the floating dtypes that Inductor's patterns are traced for; such a pattern may match in no other."""
    return frozenset(
        value.dtype
        for pattern in declared.patterns
        if isinstance(pattern, InductorReplacement)
        for value in pattern.examples()
        if isinstance(value, Tensor) and value.is_floating_point()
    )


def _searched(pattern: InductorReplacement, turn: int) -> Built:
    """Return a search pattern on inputs like its own examples, its numbers unlike the declared odd ones."""
    names = [name for name in inspect.signature(pattern.search).parameters if name not in pattern.scalars]
    given = dict(zip(names, pattern.examples(), strict=True))
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    fixed = {name: value for name, value in given.items() if name not in tensors}
    for position, (name, value) in enumerate(pattern.scalars.items()):
        numbers = [each for each in _SCALARS[type(value) is int] if each != value]
        fixed[name] = numbers[(turn + position) % len(numbers)]
    return Pattern(pattern.search, list(tensors), fixed), _named([_like(tensor) for tensor in tensors.values()])


def _like(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator)
    return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype)


def _running(function: Callable[..., Any], literals: Sequence[str] = ()) -> Iterator[Callable[[], Built]]:
    """Yield models of a pattern that run: for likely shapes, numbers and dtypes of its parameters."""
    called = function.forward if isinstance(function, nn.Module) else function
    parameters = list(inspect.signature(called).parameters)
    tensors = [name for name in parameters if name not in literals]
    for values, shapes in itertools.product(_values(literals), _SHAPES):
        inputs = [_like(torch.empty(shapes[0] if i == 0 else shapes[1])) for i in range(len(tensors))]
        model = Pattern(function, tensors, values)
        try:
            with torch.no_grad():
                result = model(*(tensor.clone() for tensor in inputs))
        except Exception:  # a pattern fails with any exception on inputs it was not written for
            continue
        if all(isinstance(each, Tensor) for each in (result if isinstance(result, (tuple, list)) else (result,))):
            yield partial(_built, model, inputs)


def _built(model: nn.Module, inputs: Sequence[Tensor]) -> Built:
    return model, _named(inputs)


def _values(literals: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield values for literals: numbers for all, then a dtype for one of them."""
    for numbers in _NUMBERS:
        yield dict(zip(literals, itertools.cycle(numbers), strict=False))
    for name in literals:
        for dtype, numbers in itertools.product((torch.float32, torch.bfloat16), _NUMBERS):
            given = dict(zip(literals, itertools.cycle(numbers), strict=False))
            yield {**given, name: dtype}


def _module(pattern: InductorGraphPattern) -> fx.GraphModule:
    """Return what a tree of `CallFunction` computes, as a module of a tensor per named or anonymous argument."""
    from torch._inductor.pattern_matcher import Arg, CallFunction, KeywordArg

    graph = fx.Graph()
    known: dict[Any, fx.Node] = {}

    def leaves(expression: Any) -> None:
        if isinstance(expression, (Arg, KeywordArg)):
            key = _key(expression)
            if key not in known:
                known[key] = graph.placeholder(f"x{len(known)}")
        elif isinstance(expression, CallFunction):
            for each in (*expression.args, *expression.kwargs.values()):
                leaves(each)

    def node(expression: Any) -> Any:
        if isinstance(expression, CallFunction) and _key(expression) not in known:
            function: Any = expression.fns[0]
            kwargs = {name: node(each) for name, each in expression.kwargs.items()}
            args = tuple(map(node, expression.args))
            known[_key(expression)] = graph.call_function(function, args, kwargs)
        return known.get(_key(expression), expression)

    tree = pattern.pattern()
    leaves(tree)  # placeholders come first
    graph.output(node(tree))
    return fx.GraphModule(nn.Module(), graph)


def _key(expression: Any) -> Any:
    """Return the identity of a part of a pattern: arguments of the same name are one."""
    return getattr(expression, "name", None) or id(expression)
