"""A finished graph as readable JSON, and back: its nodes, the tensors of its placeholders, its conditions.

Tensors are never stored but named by the path that leads to them, and joined weights by what they are joined from; only
small literals of the traced code itself are written out. Anything without an exact form raises `Uncacheable`.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from core.common.passes.packing import Owners, Packing
from core.common.passes.sites import site_name
from core.compilation.cache import sizes
from core.compilation.cache.literals import Targets, decode, encode
from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.cache.values import name_of
from core.compilation.implementations import BREAK_POINT
from core.compilation.trace.traced import (
    ConstantSlot,
    CounterSlot,
    InputSlot,
    OutputRef,
    OutputTree,
    SizeSlot,
    Slot,
    TracedGraph,
)

MAX_LITERAL_BYTES = 1 << 16
"""Largest size of a tensor literal in the traced code, in bytes."""
PathOf = Callable[[Tensor], "str | None"]


def encode_graph(traced: TracedGraph, targets: Targets, path_of: PathOf) -> dict[str, Any]:
    """Return a graph with its bindings as JSON-ready values; raise `Uncacheable` with the reason where it has none.

    path_of: the path to a tensor of the program's callables, None for others.
    """
    for counter in traced.counters:
        raise Uncacheable(f"the model counts on {counter.name} of a {type(counter.owner).__qualname__}")
    symbols = {symbol.name: symbol for symbol in traced.symbols}
    return {
        "nodes": [encode_node(node, targets) for node in traced.module.graph.nodes],
        "attributes": _encode_attributes(traced, path_of),
        "slots": [_encode_slot(slot, path_of) for slot in traced.slots],
        "output": [_encode_leaf(ref) for ref in traced.output.leaves],
        "structure": _checked_structure(traced.output.spec),
        "output_sizes": [[sizes.encode_size(size, symbols) for size in fake.shape] for fake in traced.outputs],
        "shapes": {name: list(shape) for name, shape in traced.shapes.items()},
        "symbols": [sizes.encode_symbol(symbol, traced) for symbol in traced.symbols],
        **sizes.encode_conditions(traced, symbols),
    }


def decode_graph(text: Mapping[str, Any], targets: Targets, tensors: Mapping[str, Tensor]) -> TracedGraph:
    """Return the graph that `encode_graph` wrote, bound to these tensors by path; weights are joined as they were.

    Raises `Uncacheable` where weights can't be joined now; KeyError, ValueError and the like where the text is wrong.
    """
    symbols = {each["name"]: sizes.make_symbol(each["name"], each["assumptions"]) for each in text["symbols"]}
    placed = {symbols[each["name"]]: each for each in text["symbols"]}
    leaves = tuple(OutputRef(**each) for each in text["output"])
    return TracedGraph(
        module=_decode_module(text, targets, tensors),
        slots=_decode_slots(text["slots"], tensors),
        output=OutputTree(leaves, _decode_structure(text["structure"])),
        outputs=tuple(sizes.decode_output(shape, symbols) for shape in text["output_sizes"]),
        shapes={name: tuple(shape) for name, shape in text["shapes"].items()},
        symbols={symbol: SizeSlot(each["input"], each["dim"]) for symbol, each in placed.items()},
        least={symbol: each["least"] for symbol, each in placed.items()},
        shape_env=sizes.decode_conditions(text, symbols) if symbols else None,
        elapsed_s=0.0,
    )


def encode_node(node: fx.Node, targets: Targets) -> dict[str, Any]:
    """Return a node as JSON-ready values; `module` is for readers. Raises `Uncacheable`."""
    if node.op == "call_module":
        raise Uncacheable(f"the graph calls a module, at {node.name}")
    text: dict[str, Any] = {"op": node.op, "name": node.name}
    if node.op == "call_function":
        text["target"] = targets.name(node.target)
    elif node.op in ("call_method", "get_attr"):
        text["target"] = node.target
    if node.args:
        text["args"] = [encode(each) for each in node.args]
    if node.kwargs:
        text["kwargs"] = {name: encode(each) for name, each in node.kwargs.items()}
    if BREAK_POINT in node.meta:
        text["break_point"] = node.meta[BREAK_POINT]
    where = site_name(node)
    if node.op.startswith("call") and where != node.name:
        text["module"] = where  # for the reader
    return text


def _decode_module(text: Mapping[str, Any], targets: Targets, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, each in text["attributes"].items():
        value = tensors[each["path"]] if "path" in each else _decode_literal(each, tensors)
        root.register_buffer(name, value)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for each in text["nodes"]:
        target: Any = each.get("target", each["name"])
        if each["op"] == "call_function":
            target = targets.find(target)
        args = tuple(decode(value, nodes) for value in each.get("args", ()))
        kwargs = {name: decode(value, nodes) for name, value in each.get("kwargs", {}).items()}
        node = graph.create_node(each["op"], target, args, kwargs, each["name"])
        if "break_point" in each:
            node.meta[BREAK_POINT] = each["break_point"]
        nodes[each["name"]] = node
    graph.lint()
    return _LazyGraphModule(root, graph)


def _encode_attributes(traced: TracedGraph, path_of: PathOf) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in traced.module.graph.find_nodes(op="get_attr"):
        value = getattr(traced.module, str(node.target), None)
        if not isinstance(value, Tensor) or "." in str(node.target):
            raise Uncacheable(f"the graph holds {node.target}, a {type(value).__name__}")
        path = path_of(value)
        if path is None and not any(value is literal for literal in traced.literals):
            raise Uncacheable(f"the graph holds {node.target}, a tensor computed by a pass")
        found[str(node.target)] = _encode_literal(str(node.target), value) if path is None else {"path": path}
    return found


def encode_attributes_whole(module: fx.GraphModule) -> dict[str, Any]:
    """Return the tensors that a graph stores by content; raise `Uncacheable` for large ones and for other objects."""
    found: dict[str, Any] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if not isinstance(value, Tensor) or "." in str(node.target):
            raise Uncacheable(f"the graph holds {node.target}, a {type(value).__name__}")
        found[str(node.target)] = _encode_literal(str(node.target), value)
    return found


def _encode_literal(name: str, value: Tensor) -> dict[str, Any]:
    if type(value) is not Tensor or value.nbytes > MAX_LITERAL_BYTES or value.is_quantized:
        raise Uncacheable(f"the graph holds {name}, a {type(value).__name__} of {value.nbytes} bytes")
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {
        "dtype": encode(value.dtype),
        "device": str(value.device),
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "data": base64.b64encode(data).decode(),
    }


def _decode_literal(text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    data = torch.frombuffer(bytearray(base64.b64decode(text["data"])), dtype=torch.uint8) if text["data"] else None
    dtype, shape = decode(text["dtype"], {}), text["shape"]
    dense = torch.empty(shape, dtype=dtype) if data is None else data.view(dtype).view(shape)
    value = torch.empty_strided(shape, text["stride"], dtype=dtype, device=text["device"])
    return value.copy_(dense)


def _encode_slot(slot: Slot, path_of: PathOf) -> dict[str, Any]:
    if isinstance(slot, InputSlot):
        return {"input": slot.name}
    if isinstance(slot, SizeSlot):
        return {"size": slot.name, "dim": slot.dim}
    assert not isinstance(slot, CounterSlot)  # refused before
    if slot.packing is not None:
        parts = [None if part is None else _path(part, path_of) for part in slot.packing.parts]
        return {"joined": parts, "rows": list(slot.packing.sizes)}
    if isinstance(slot.value, Tensor):
        return {"tensor": _path(slot.value, path_of)}
    if slot.value is None or type(slot.value) in (bool, int, float, str):
        return {"value": encode(slot.value)}
    raise Uncacheable(f"the graph is bound to a {type(slot.value).__qualname__}")


def _path(tensor: Tensor, path_of: PathOf) -> str:
    path = path_of(tensor)
    if path is None:
        raise Uncacheable(
            f"the graph is bound to a tensor {tensor.dtype} {list(tensor.shape)} that is none of the model's: "
            "made in its forward, or computed by a pass"
        )
    return path


def _decode_slots(texts: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    plain = [tensors[text["tensor"]] for text in texts if "tensor" in text]
    owners = Owners({id(tensor): tensor for tensor in plain}.values())
    slots: list[Slot] = []
    for text in texts:
        if "input" in text:
            slots.append(InputSlot(text["input"]))
        elif "size" in text:
            slots.append(SizeSlot(text["size"], text["dim"]))
        elif "joined" in text:
            slots.append(_join(text, tensors, owners))
        else:
            slots.append(ConstantSlot(tensors[text["tensor"]] if "tensor" in text else decode(text["value"], {})))
    return tuple(slots)


def _join(text: Mapping[str, Any], tensors: Mapping[str, Tensor], owners: Owners) -> ConstantSlot:
    parts = tuple(None if path is None else tensors[path] for path in text["joined"])
    packing = Packing(parts, tuple(text["rows"]))
    with torch.no_grad():
        refused = owners.refusal(packing)
        if refused:
            raise Uncacheable(f"the weights {text['joined']} can't be joined now: {refused}")
        return ConstantSlot(packing.pack(), packing)


def _encode_leaf(ref: OutputRef) -> dict[str, Any]:
    if isinstance(ref.value, Tensor):
        raise Uncacheable("the model returns a tensor that it did not compute")
    text = {"index": ref.index, "name": ref.name, "value": encode(ref.value)}
    if isinstance(text["value"], dict):
        raise Uncacheable(f"the model returns the number {ref.value}")
    return text


def _checked_structure(spec: pytree.TreeSpec) -> Any:
    text = _encode_structure(spec)
    if _decode_structure(text) != spec:
        raise Uncacheable(f"the model's output structure does not read back as itself: {spec}")
    return text


def _encode_structure(spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return "leaf"
    children = [_encode_structure(spec.child(index)) for index in range(spec.num_children)]
    return {"type": _class_name(spec.type), "context": _encode_context(spec.context), "children": children}


def _decode_structure(text: Any) -> pytree.TreeSpec:
    if text == "leaf":
        return pytree.tree_flatten(0)[1]
    children = [_decode_structure(child) for child in text["children"]]
    return pytree.TreeSpec(_find_class(text["type"]), _decode_context(text["context"]), children)


def _encode_context(context: Any) -> Any:
    if isinstance(context, type):
        return {"class": _class_name(context)}
    if isinstance(context, list):
        return [_encode_context(item) for item in context]
    return encode(context)


def _decode_context(text: Any) -> Any:
    if isinstance(text, dict) and "class" in text:
        return _find_class(text["class"])
    return [_decode_context(item) for item in text] if isinstance(text, list) else decode(text, {})


def _class_name(kind: type) -> str:
    name = name_of(kind)
    try:
        found = _find_class(name)
    except (ImportError, AttributeError):
        found = None
    if found is not kind:
        raise Uncacheable(f"the model returns a {name}, and no import leads to that class")
    return name


def _find_class(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
