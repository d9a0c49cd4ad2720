"""Why a graph of Dynamo has to run as it was traced: what the rest of the way can't keep right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Buffer, Parameter

from core.common.node_meta import value_of

_PLAIN = (Tensor, Parameter, Buffer)
GRADIENTS = (
    "it computes gradients, or results that require them: in training, autograd needs the traced ops. For inference, "
    "call it under torch.inference_mode() or torch.no_grad()"
)
AUTOCAST = (
    "autocast is on, which changes the dtypes of ops one by one: passes read dtypes off the graph. Cast the model "
    "instead: model.to(torch.bfloat16)"
)
_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
SHARED = "an input that the graph writes into shares its memory with another input of this call"


def why_original(graph: fx.GraphModule, examples: Sequence[Any]) -> str:
    """Return why a graph must run as Dynamo traced it, or "". examples: what its placeholders receive."""
    idle = set(_idle_switches(graph))
    for node in graph.graph.nodes:
        value = value_of(node)
        # Parameters are leaves: they require a gradient in no_grad mode too, where nothing computed from them does.
        if any(tensor.requires_grad and not tensor.is_leaf for tensor in _tensors(value)):
            return GRADIENTS
        if node.target in (_ENTER, _EXIT) and node not in idle:
            return AUTOCAST
        if any(_unbacked(size) for tensor in _tensors(value) for size in tensor.shape) or _unbacked(value):
            return f"the size of {node.name} depends on the values of tensors, so no shape can be compiled for"
    kinds = {device.type for device in devices(graph)}
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        return AUTOCAST
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True):
        why = _unfit(example)
        if why:
            return f"its input {node.name} is {why}"
    return ""


def drop_idle_autocast(graph: fx.GraphModule) -> None:
    """Remove, in place, regions of autocast that change nothing: models switch it off around what needs fp32."""
    for node in reversed(_idle_switches(graph)):
        graph.graph.erase_node(node)


def _idle_switches(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that enter and leave autocast, where no region switches it on for the graph's devices and none
    is on around the graph, for which Dynamo has a guard."""
    kinds = {device.type for device in devices(graph)}
    switches = [node for node in graph.graph.nodes if node.target in (_ENTER, _EXIT)]
    entered = [node.args for node in switches if node.target is _ENTER]
    if any(torch.is_autocast_enabled(kind) or [kind, True] == [args[0], args[2]] for args in entered for kind in kinds):
        return []
    return switches


def devices(graph: fx.GraphModule) -> set[torch.device]:
    """Return the devices on which the tensors of a graph are, scalars of the host left out where others are."""
    found = {t.device for node in graph.graph.nodes for t in _tensors(value_of(node)) if t.dim()}
    return found or {t.device for node in graph.graph.nodes for t in _tensors(value_of(node))}


def _unfit(example: Any) -> str:
    if isinstance(example, FakeTensor):
        return "a fake tensor"
    if isinstance(example, Tensor) and (type(example) not in _PLAIN or example.layout != torch.strided):
        return f"a {type(example).__module__}.{type(example).__qualname__} of layout {example.layout}"
    if not isinstance(example, (Tensor, torch.SymInt, int)):
        return f"a {type(example).__name__}, neither a tensor nor a size"
    return ""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (item for item in value if isinstance(item, Tensor))


def _unbacked(value: Any) -> bool:
    """Tell whether a size is known only when the graph runs."""
    if not isinstance(value, torch.SymInt):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))
