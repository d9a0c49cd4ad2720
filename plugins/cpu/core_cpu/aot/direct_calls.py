"""Lets compiled graphs call the plugin's kernels as C functions (csrc/binding.h), without torch's dispatcher.

A call through the dispatcher takes about 1 µs more, and a small model's step has dozens. A graph names the kernels of
the build that was loaded when it was compiled. Where that build is not here, the graph can't be loaded, and is made
anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import fx
from torch._ops import OpOverload

from core.common.lowering import Unavailable
from core_cpu import extension
from core_cpu.own_ops import CALLED_BY, SOURCES_OF

_FILE = "kernels.json"
"""Lies beside a graph's shared object, and names the files of the kernels that it calls."""
_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "const AtenTensorHandle*",
    "float": "double",
    "int": "int64_t",
    "bool": "int32_t",
    "ScalarType": "int32_t",
}
"""The types of arguments as binding.h has them; a kernel that takes others is called through the dispatcher."""


class DirectCalls:
    """The calls of a graph that go to the plugin's kernels directly."""

    def __init__(self, graph: fx.GraphModule) -> None:
        """graph: finished. Loads the kernels that it calls."""
        targets = [CALLED_BY.get(node.target, node.target) for node in graph.graph.nodes if callable(node.target)]
        called = dict.fromkeys(target for target in targets if isinstance(target, OpOverload))
        found = {op: _declaration(op) for op in called if op in SOURCES_OF}
        #: the C function of each op, as C declares it
        self.declarations: Mapping[OpOverload, str] = {op: text for op, text in found.items() if text}

    def write(self, folder: Path, *more: str) -> None:
        """Note in the folder of the graph's shared object which kernels, and what more, has to be loaded before it."""
        sources = sorted({SOURCES_OF[op] for op in self.declarations} | {*more})
        if sources:
            (folder / _FILE).write_text(json.dumps(sources), encoding="utf-8")


def load_kernels(folder: Path) -> Sequence[str]:
    """Load what the graph in a folder needs, and return the names of its files in csrc/.

    Raises `Unavailable` with the reason where that fails.
    """
    path = folder / _FILE
    sources: Sequence[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else ()
    for source in sources:
        if reason := extension.load(source):
            raise Unavailable(reason)
    return sources


def _declaration(op: OpOverload) -> str:
    """Return the declaration of an op's C function; "" where the kernel has none or is not here."""
    source, schema = SOURCES_OF[op], op._schema
    types = [_C_TYPES.get(str(argument.type)) for argument in schema.arguments]
    if None in types or {str(result.type) for result in schema.returns} != {"Tensor"} or extension.load(source):
        return ""
    name = schema.name.partition("::")[2]
    arguments = ", ".join(map(str, (*types, *("AtenTensorHandle*" for _ in schema.returns))))
    # AOTInductor prescribes the first name, and the second is what is looked for when the graph is loaded.
    symbol = f"core_cpu_{name}_{extension.ending(source)}"
    return f'AOTITorchError (*aoti_torch_cpu_{name})({arguments}) __asm__("{symbol}")'
