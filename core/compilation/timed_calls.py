"""Calls of canonical ops as they are timed: in the sizes of a bucket, with the program's own weights and caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall
from core.compilation.implementations import OpChoice

MAX_ALIKE = 32
"""Alike calls that are made one behind the other, at most."""
_STD = 0.1
"""Standard deviation of the random numbers that floating tensors hold."""
Arguments = Mapping[str, Any]
"""Arguments of a call of an op by name."""
Values = Mapping[fx.Node, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What a tensor is without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, device: torch.device) -> Tensor:
        """Return a tensor of this form whose content is open."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def make(self, device: torch.device) -> Tensor:
        """Return a tensor of this form: random numbers, or zeros where it holds integers."""
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if all(self.shape) else 0
        if not self.dtype.is_floating_point:
            memory = torch.zeros(size, dtype=self.dtype, device=device)
        else:
            generator = torch.Generator(device).manual_seed(0)
            memory = torch.empty(size, dtype=torch.float32, device=device).normal_(std=_STD, generator=generator)
            memory = memory.to(self.dtype)
        return memory.as_strided(self.shape, self.stride)


@dataclass(slots=True)
class AlikeCalls:
    """Calls of one bucket that differ in nothing but the program's own tensors."""

    #: Arguments by name, tensors as their forms.
    fixed: Mapping[str, Any]
    choices: list[OpChoice] = field(default_factory=list)
    #: The program's own tensors by argument, of up to `MAX_ALIKE` calls.
    own: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, choice: OpChoice, own: dict[str, Tensor]) -> None:
        """Add a call. own: the program's tensors among its arguments."""
        self.choices.append(choice)
        if len(self.own) < MAX_ALIKE:
            self.own.append(own)

    def described(self, op: CanonicalOp, device: torch.device) -> OpCall:
        """Return the call as conditions see it, with the sizes of its bucket."""
        with FakeTensorMode():
            args = {n: v.on(device) if isinstance(v, Form) else v for n, v in self.fixed.items()}
        return OpCall(op=op.qualified_name, args=args)

    def made(self, op: CanonicalOp, device: torch.device) -> list[Arguments]:
        """Return the arguments of the calls; what is not the program's own they share."""
        own = self.own if any(self.own) else self.own[:1]
        shared = {n: v.make(device) if isinstance(v, Form) else v for n, v in self.fixed.items() if n not in own[0]}
        # Of the program's own tensors, too, those that index others get the values of a step.
        indices = op.indices(shared | own[0]) if op.indices is not None else {}
        return [shared | each | indices for each in own]


def in_bucket(arguments: Mapping[str, Any], sizes: Mapping[Any, int]) -> dict[str, Any] | None:
    """Return arguments with the sizes of a bucket, tensors as forms; None where a size is not known."""

    def size(value: Any) -> int:
        return int(value.node.expr.xreplace(dict(sizes))) if isinstance(value, torch.SymInt) else int(value)

    found: dict[str, Any] = {}
    try:
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                found[name] = Form(
                    dtype=value.dtype, shape=tuple(map(size, value.shape)), stride=tuple(map(size, value.stride()))
                )
            else:
                found[name] = size(value) if isinstance(value, torch.SymInt) else value
    except TypeError:  # a symbol that no input has
        return None
    return found


def own_tensors(node: fx.Node, op: CanonicalOp, values: Values) -> dict[str, Tensor]:
    """Return the arguments that are tensors of the program, such as weights and caches: these are not made anew.

    What the op writes is one of them only where its `indices` say where it writes to.
    """
    named = (*zip(op.positional, node.args, strict=False), *node.kwargs.items())
    found = {name: values.get(arg) for name, arg in named if isinstance(arg, fx.Node)}
    spared = () if op.indices is not None else op.mutates
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and name not in spared}


def graph_of(op: CanonicalOp, arguments: Mapping[str, Any]) -> fx.GraphModule:
    """Return a graph of this one call, by which its times are kept."""
    graph = fx.Graph()
    nodes = {n: graph.placeholder(n) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    args = tuple(nodes.pop(name) for name in op.positional)
    graph.output(graph.call_function(op.overload, args, nodes))
    return fx.GraphModule(torch.nn.Module(), graph)
