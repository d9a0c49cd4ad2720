"""Declarations of inputs made from examples: shapes and dtypes of tensors, dimensions named as `torch.export` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from core.compilation.arguments import check_model
from core.compilation.capture.inputs import Buckets, InputSpec
from core.errors import UsageError

Declared: TypeAlias = Mapping[str, InputSpec] | Mapping[str, Tensor] | Sequence[Tensor | InputSpec] | Tensor
ExampleInputs: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
Dynamic: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""By input, `{dimension: name}` or a tuple with a name or None for each dimension; inputs without are left out or
None. A name is a text or a `torch.export.Dim`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What a program's inputs are."""

    inputs: Mapping[str, InputSpec]
    buckets: Buckets | None
    #: The examples that it was made from, by name; empty where there are none.
    examples: Mapping[str, Tensor]


def declare(
    model: Any,
    inputs: Declared | None,
    example_inputs: ExampleInputs | None,
    dynamic: Dynamic | None,
    buckets: Buckets | None,
    *,
    asked: str = "core.compile",
) -> Declaration:
    """Return the declared inputs; raise `UsageError` where they are given twice, not at all, or don't fit.

    asked: the function that was called, for errors. Named dimensions without buckets get one bucket, of the sizes that
    the examples have.
    """
    if (inputs is None) == (example_inputs is None):
        raise UsageError(
            f"{asked} with inputs and example_inputs" if inputs is not None else f"{asked} without inputs",
            found="both say what the model is called with" if inputs is not None else "nothing says what to trace with",
            remedy="give example_inputs=(tensor, …), or inputs={name: core.InputSpec(…)}",
        )
    given = inputs if inputs is not None else example_inputs
    named = _by_name(model, given)
    examples = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if inputs is not None and not examples:
        if dynamic is not None:
            raise UsageError(
                f"{asked} with dynamic and declared inputs",
                found="an InputSpec names its dimensions itself",
                remedy="write the name into the shape: core.InputSpec(('batch', 64), torch.float32)",
            )
        return Declaration(inputs=named, buckets=buckets, examples={})
    mixed = next((name for name, value in named.items() if not isinstance(value, Tensor)), None)
    if mixed is not None:
        raise UsageError(
            f"example input {mixed!r}",
            found=f"a {type(named[mixed]).__name__}",
            remedy="give a tensor for each input; fix other arguments by a wrapper or functools.partial",
        )
    names = _names_of_dimensions(examples, dynamic)
    specs, sizes = {}, dict[str, int]()
    for name, tensor in examples.items():
        shape = tuple(names.get((name, place), size) for place, size in enumerate(tensor.shape))
        specs[name] = InputSpec(shape, tensor.dtype)
        specs[name].measure(name, tensor.shape, sizes)
    return Declaration(inputs=specs, buckets=[sizes] if buckets is None and sizes else buckets, examples=examples)


def _by_name(model: Any, given: Any) -> dict[str, Any]:
    """Return what was given by the names of the model's parameters."""
    if isinstance(given, Mapping):
        return dict(given)
    given = (given,) if isinstance(given, Tensor) else given
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(
            f"inputs={given!r}",
            found=f"{type(given).__name__}, neither a mapping by name nor tensors in the order of its parameters",
            remedy="write (x,) or [x]",
        )
    if isinstance(model, Mapping):
        raise UsageError(
            "inputs by place for a model of each phase",
            found="their parameters may come in different orders",
            remedy="give a mapping by name",
        )
    check_model(model)
    function: Callable[..., Any] = model.forward if isinstance(model, torch.nn.Module) else model
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise UsageError(
            f"inputs by place for {model!r}",
            found="a builtin function, which does not tell the names of its parameters",
            remedy="give a mapping by name, or wrap it: lambda x: …",
        ) from None
    names = [each.name for each in parameters if each.kind in kinds]
    if len(given) > len(names):
        raise UsageError(
            f"{len(given)} inputs by place",
            found=f"the model takes {len(names)} of them: {', '.join(names) or 'none'}",
            remedy="give a mapping by name",
        )
    return dict(zip(names, given, strict=False))


def _names_of_dimensions(examples: Mapping[str, Tensor], dynamic: Dynamic | None) -> dict[tuple[str, int], str]:
    """Return the names of dimensions by input and place."""
    if dynamic is None:
        return {}
    if not isinstance(dynamic, (Mapping, Sequence)) or isinstance(dynamic, str):
        raise _wrong(f"dynamic={dynamic!r}", f"a {type(dynamic).__name__}", next(iter(examples), "x"))
    if not isinstance(dynamic, Mapping):
        dynamic = dict(zip(examples, dynamic, strict=False))
    found = {}
    for name, dims in dynamic.items():
        if name not in examples:
            raise _wrong(
                f"dynamic dimensions of {name!r}", f"the inputs are {', '.join(examples)}", next(iter(examples), "x")
            )
        if dims is not None and not isinstance(dims, (Mapping, tuple, list)):
            raise _wrong(f"dynamic dimensions {dims!r} of {name!r}", f"a {type(dims).__name__}", name)
        for place, dim in dict(dims if isinstance(dims, Mapping) else enumerate(dims or ())).items():
            if dim is None:
                continue
            rank = examples[name].dim()
            text = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
            if not isinstance(place, int) or not -rank <= place < rank or not isinstance(text, str):
                asked = f"dynamic dimension {place!r}: {dim!r} of {name!r}"
                found_there = (
                    f"its example has {rank} dimensions" if isinstance(text, str) else "no name of a dimension"
                )
                raise _wrong(asked, found_there, name)
            found[name, place % rank] = text
    return found


def _wrong(asked: str, found: str, name: str) -> UsageError:
    """name: of an input of this very model, which what to write is shown with."""
    remedy = f"write it like dynamic={{{name!r}: {{0: 'batch'}}}}, by input and dimension"
    return UsageError(asked, found=found, remedy=remedy)
