"""The nodes of a graph as records for readers: what each computes, of which shape, in which module and source line."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from core.common.node_meta import value_of
from core.common.ops.declaration import find_op
from core.common.passes.sites import site_name
from core.compilation.trace.traced import CounterSlot, InputSlot, SizeSlot, Slot, TracedGraph

# How Dynamo spells a member: `._modules['norm']`, `._parameters['weight']`, `.layers[0]`.
_MEMBER = re.compile(r"(?:\.?\b_modules|\.?\b_parameters|\.?\b_buffers)?\[(?:'([^']*)'|(\d+))\]")
_ORIGIN = re.compile(r"^[LG]\['[^']*'\](?:\.__closure__\[\d+\]\.cell_contents)*\.?")
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in .*\n\s*(.*)')
# What runs a model is not the model's code: PyTorch itself, and what is around a model here.
_NO_MODEL = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[1])
_SHORT = 120
_ADDED = "bound once, added by a pass"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """One node of a graph."""

    name: str
    #: The name shown to readers: for an input its name, for a weight its path in the model, else the node's name.
    label: str
    #: What it computes, for counting (`core::rms_norm`, `mul`, `.to`); "" for inputs and the output.
    op: str
    #: The call, its arguments by label.
    text: str
    #: Dtype and shape of the result.
    value: str
    #: Path of its module; may be "".
    path: str
    #: File, line and text of the model's code; `file` is its whole path, "" where no code is known, `lineno` from 1.
    source: str
    file: str = ""
    lineno: int = 0
    #: Index of the change that made the node (in a graph after the passes) or removed it (in one before); -1 for none.
    change: int = -1
    #: The pass of that change.
    by: str = ""

    @property
    def is_call(self) -> bool:
        """Whether the node computes something: neither an input nor the output."""
        return bool(self.op)

    @property
    def line(self) -> str:
        """The node as one line of text."""
        named = f"{self.label}: {self.value}" if self.value else self.label
        return f"{named} = {self.text}" if self.op else f"{named}  ({self.text})" if self.value else self.text


def input_labels(traced: TracedGraph) -> dict[str, str]:
    """Return for each placeholder a name that says what it is bound to: an input, or a path such as `norm.weight`."""
    nodes = traced.module.graph.find_nodes(op="placeholder")
    taken = {node.name for node in traced.module.graph.nodes}
    labels: dict[str, str] = {}
    for node, slot in zip(nodes, traced.slots, strict=True):
        label = slot.name if isinstance(slot, InputSlot) else _source_name(node)
        labels[node.name] = label if label and label not in taken else node.name
        taken.add(labels[node.name])
    return labels


def input_texts(traced: TracedGraph) -> dict[str, str]:
    """Return for each placeholder a description of its value."""
    nodes = traced.module.graph.find_nodes(op="placeholder")
    return {node.name: _slot_text(slot) for node, slot in zip(nodes, traced.slots, strict=True)}


def _slot_text(slot: Slot) -> str:
    if isinstance(slot, InputSlot):
        return "input"
    if isinstance(slot, CounterSlot):
        return f"{slot.name} of a {type(slot.owner).__name__}, at each run"
    return f"size of {slot.name}, dimension {slot.dim}" if isinstance(slot, SizeSlot) else "bound once"


def _source_name(node: fx.Node) -> str:
    """Return the origin of a placeholder according to Dynamo, as the model spells it; "" if unknown."""
    source: Any = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    name = name() if callable(name) else name  # a method before torch 2.12
    path = _MEMBER.sub(lambda match: f".{match[1] or match[2]}", _ORIGIN.sub("", str(name)))
    return path.strip(".")


def records(
    graph: fx.Graph, labels: Mapping[str, str], inputs: Mapping[str, str], names: Container[str] | None = None
) -> tuple[NodeRecord, ...]:
    """Return a record of each node, in order. labels, inputs: by placeholder, its name and what it is bound to.

    names: of the nodes that are wanted; None for all.
    """
    return tuple(_record(node, labels, inputs) for node in graph.nodes if names is None or node.name in names)


def _record(node: fx.Node, labels: Mapping[str, str], inputs: Mapping[str, str]) -> NodeRecord:
    is_input = node.op == "placeholder"
    file, lineno, source = ("", 0, "") if is_input else _source(node.meta.get("stack_trace"))
    return NodeRecord(
        name=node.name,
        label=labels.get(node.name, node.name),
        op=op_name(node),
        text=inputs.get(node.name, _ADDED) if is_input else _text(node, labels),
        value=_value(value_of(node)),
        path="" if is_input else path_of(node),
        source=source,
        file=file,
        lineno=lineno,
    )


def path_of(node: fx.Node) -> str:
    """Return the path of the node's module, "" for what belongs to none."""
    return site_name(node) if node.meta.get("nn_module_stack") and site_name(node) != node.name else ""


def op_name(node: fx.Node) -> str:
    """Return what a call computes, as reports count it: a canonical op's name, a function's, or `.method`."""
    if not node.op.startswith("call_"):
        return node.op if node.op == "get_attr" else ""
    if node.op != "call_function":
        return f".{node.target}" if node.op == "call_method" else str(node.target)
    op = find_op(node.target)
    if op is not None:
        return op.qualified_name
    target: Any = node.target
    return str(target) if hasattr(target, "_schema") else str(getattr(target, "__name__", target))


def _text(node: fx.Node, labels: Mapping[str, str]) -> str:
    args = [_argument(arg, labels) for arg in node.args]
    if node.op == "output":
        return f"output {', '.join(args)}"
    if node.op == "get_attr":
        return str(node.target)
    args += [f"{name}={_argument(arg, labels)}" for name, arg in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1].removeprefix('(').removesuffix(')')}]"
    return f"{op_name(node)}({', '.join(args)})"


def _argument(value: Any, labels: Mapping[str, str]) -> str:
    if isinstance(value, fx.Node):
        return labels.get(value.name, value.name)
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_argument(item, labels) for item in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, slice):
        ends = ["" if end is None else _argument(end, labels) for end in (value.start, value.stop)]
        return ":".join(ends) + ("" if value.step is None else f":{_argument(value.step, labels)}")
    if value is Ellipsis:
        return "..."
    plain = isinstance(value, (torch.dtype, torch.device))
    return str(value).removeprefix("torch.") if plain else repr(value)


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        inner = [_value(item) for item in value]
        return f"({', '.join(inner)})" if any(inner) else ""
    return "int" if isinstance(value, torch.SymInt) else ""


def _source(trace: str | None) -> tuple[str, int, str]:
    """Return file and line of the innermost line of the model's code, and both with it: `modeling.py:66: return …`."""
    frames = _FRAME.findall(trace or "")
    if not frames:
        return "", 0, ""
    of_model = [frame for frame in frames if _is_of_model(frame[0])]
    file, line, code = (of_model or frames)[-1]
    text = f"{file.replace(os.sep, '/').rpartition('/')[2]}:{line}: {code.strip()}"
    return file, int(line), text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


@cache
def _is_of_model(file: str) -> bool:
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _NO_MODEL)
