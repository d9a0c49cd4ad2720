"""Stitching: the replay of a graph captured in parts, as generated plain Python.

One line per graph and one per eager call, every tensor bound once: no interpreter and no look-up runs per step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from core.common.graphs.backend import GraphKey
from core.errors import CaptureError


@dataclass(frozen=True, slots=True)
class GraphStep:
    """Replay of one captured part."""

    key: GraphKey


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A call between two graphs, on static arguments."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: For each tensor of the result, in order, the static tensor that the graphs read it from; None where the result
    #: lies in memory of an argument or of the function's own.
    targets: tuple[Tensor | None, ...]
    #: For each tensor of the result that has no target, the tensor that the graphs read in its place; else None.
    kept: tuple[Tensor | None, ...] = ()

    def changed(self, change: Callable[[Any], Any]) -> EagerStep:
        """Return the step with a function applied to all its tensors."""
        return EagerStep(self.name, self.fn, *change((self.args, self.kwargs, self.targets, self.kept)))


Step = GraphStep | EagerStep


def stitch(name: str, steps: Sequence[Step], replay: Callable[[GraphKey], object]) -> tuple[Callable[[], None], str]:
    """Return a function that runs the steps in order, and its source. replay: runs one captured part."""
    names: dict[str, Any] = {"land": land}
    lines = [f"def {name}():"]
    for number, step in enumerate(steps):
        if isinstance(step, GraphStep):
            names[f"graph_{step.key.part}"] = partial(replay, step.key)
            lines.append(f"    graph_{step.key.part}()")
        else:
            lines += _eager_lines(number, step, names)
    if len(lines) == 1:
        lines.append("    pass")
    source = "\n".join(lines) + "\n"
    code = compile(source, f"<stitched {name}>", "exec")
    function = next(constant for constant in code.co_consts if hasattr(constant, "co_code"))
    return FunctionType(function, names, name), source


def _eager_lines(number: int, step: EagerStep, names: dict[str, Any]) -> list[str]:
    """Return the lines of one eager call, and add the objects that they name to the namespace."""
    label = re.sub(r"[^0-9A-Za-z]", "_", step.name.rsplit("::")[-1])
    called = f"call_{label}_{number}"
    names[called] = step.fn
    arguments = [_name(f"{called}_a{i}", value, names) for i, value in enumerate(step.args)]
    keywords = [(key, _name(f"{called}_k{i}", value, names)) for i, (key, value) in enumerate(step.kwargs.items())]
    if all(key.isidentifier() and not iskeyword(key) for key, _ in keywords):
        arguments += [f"{key}={value}" for key, value in keywords]
    else:  # argument names that are no identifiers
        arguments.append("**{" + ", ".join(f"{key!r}: {value}" for key, value in keywords) + "}")
    call = f"{called}({', '.join(arguments)})"
    if any(kept is not None for kept in step.kept):
        names |= {"land_kept": land_kept, f"{called}_out": step.targets, f"{called}_at": step.kept}
        return [f"    land_kept({called}_out, {called}_at, {call})"]
    if all(target is None for target in step.targets):
        return [f"    {call}"]
    if len(step.targets) == 1:
        names[f"{called}_out"] = step.targets[0]
        return [f"    land({called}_out, {call})"]
    names |= {"land_all": land_all, f"{called}_out": step.targets}
    return [f"    land_all({called}_out, {call})"]


def _name(name: str, value: Any, names: dict[str, Any]) -> str:
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    names[name] = value
    if pytree.tree_is_leaf(value):
        return name
    names["fresh"] = fresh
    return f"fresh({name})"


def fresh(tree: Any) -> Any:
    """Return new containers around the same tensors: a function may change those that it is given."""
    return pytree.tree_map(lambda leaf: leaf, tree)


def land(target: Tensor, result: Any) -> None:
    """Copy an eager result to the address that the next graph reads."""
    if type(result) is not Tensor:
        leaves = leaves_of(result)
        if len(leaves) != 1:
            raise _other_structure(len(leaves), 1)
        (result,) = leaves
    if result.shape != target.shape or result.dtype is not target.dtype:
        raise _changed(target, result)
    target.copy_(result)


def land_all(targets: tuple[Tensor | None, ...], result: Any) -> None:
    """Copy several eager results, in the order of their tree."""
    leaves = leaves_of(result)
    if len(leaves) != len(targets):
        raise _other_structure(len(leaves), len(targets))
    for target, leaf in zip(targets, leaves, strict=True):
        if target is not None:
            land(target, leaf)


def land_kept(targets: tuple[Tensor | None, ...], kept: tuple[Tensor | None, ...], result: Any) -> None:
    """Copy results that have a target; check that all others are the memory that the graphs read, in the same form."""
    leaves = leaves_of(result)
    land_all(targets, leaves)
    for at, leaf in zip(kept, leaves, strict=True):
        if at is None:
            continue
        if leaf.shape != at.shape or leaf.dtype is not at.dtype:
            raise _changed(at, leaf)
        if leaf.data_ptr() != at.data_ptr() or leaf.stride() != at.stride():
            raise CaptureError(
                "an eager call between two graphs",
                found=f"its result lies at {leaf.data_ptr():#x}, and at {at.data_ptr():#x} when it was captured",
                remedy="return the same memory at each call, or a tensor made anew at each",
            )


def leaves_of(result: Any) -> list[Any]:
    """Return the tensors of a result, in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _other_structure(given: int, captured: int) -> CaptureError:
    return CaptureError(
        "an eager call between two graphs",
        found=f"it gave {given} tensors, and {captured} when it was captured",
        remedy="return the same structure at each call, or take a module around it as the break point",
    )


def _changed(target: Tensor, result: Tensor) -> CaptureError:
    return CaptureError(
        "an eager call between two graphs",
        found=f"it gave {result.dtype} of shape {tuple(result.shape)}, and {target.dtype} of shape "
        f"{tuple(target.shape)} when it was captured",
        remedy="its result must keep its shape: take a module around it as the break point",
    )
