"""The processor's lowering `inductor`: AOTInductor makes a shared object of each graph, and a step is one call.

Inductor's usual way has AOTAutograd trace each graph at each start, also where its kernels are found compiled. A shared
object is loaded as it is. Weights are inputs of it: it holds none, and serves all weights of one architecture.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx

from core.common.inductor import compile_fixed, refuse_shared_writes, specialize
from core.common.kernel_compilers import Count, KernelCompiler
from core.common.lowering import FlatCallable, LoweringRequest
from core.common.under_way import Steps, finish
from core.errors import LoweringError, one_line
from core_cpu.aot.codegen import OBJECT, generate, generate_apart
from core_cpu.aot.direct_calls import DirectCalls, load_kernels
from core_cpu.aot.graph import CONTAINER, Graph, require
from core_cpu.aot.shared_object import MODEL, build
from core_cpu.compiler import find_cxx_compiler
from core_cpu.extension import SOURCE_DIGESTS

_CUSTOM_OPS = "graph.json"
"""Describes the calls of a graph's custom ops; it lies beside the shared object under the same name."""
_RETRIED = "container.txt"
"""Says why a graph is in torch's own container that could do without."""
_compiled: list[int] = []
"""One item for each time that a graph was compiled in this process: the thread, of which each program has its own."""


def inductor(request: LoweringRequest) -> FlatCallable:
    """Compile the graph for the sizes of the example inputs, or load what was compiled before.

    The outputs of a call are fresh tensors, or views of inputs where the graph returns these. A graph that AOTInductor
    refuses is compiled as on other devices, and the report notes why.
    """
    return finish(begin_inductor(request))


def begin_inductor(request: LoweringRequest) -> Steps[FlatCallable]:
    """Do the same in steps: Inductor writes the C++ of the graph, then the C++ compiler runs by itself."""
    graph, kept = specialize(request.graph, request.example_inputs)
    constants = _lift_constants(graph)
    examples = [request.example_inputs[i] for i in kept] + constants
    refuse_shared_writes(graph, examples)
    try:
        require()  # or what was kept would be taken for damaged, and what is made now could not be run
        made = partial(_compile, graph, examples, request.background)
        compiled, contained = yield from request.artifacts.begin(factors(), made, _load)
    except Exception as error:  # any part of the compiler may raise
        if request.background:
            raise
        request.note(
            "a graph is compiled by Inductor at each start, as AOTInductor refuses it: "
            f"{type(error).__name__}: {one_line(str(error))}"
        )
        fixed = compile_fixed(graph, examples)
        return lambda *args: fixed(*[args[i] for i in kept], *constants)
    if contained:
        request.note(f"a graph is run in torch's own container, as its code without can't be used: {contained}")
    return _Step(compiled, kept, constants, examples)


class _Step:
    """A compiled graph. Its code assumes inputs like those at compile time, and checks nothing."""

    def __init__(self, graph: Graph, kept: list[int], constants: list[Tensor], like: list[Tensor]) -> None:
        """kept: indices of the arguments that are inputs. constants: further inputs after these. like: examples of all
        inputs."""
        self._graph, self._kept, self._constants = graph, kept, constants
        self._forms = list(map(_form, like))

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        return self.bind(*args)()

    def bind(self, *args: Any) -> Callable[[], tuple[Tensor, ...]]:
        """Return a callable that runs on these arguments; raise `LoweringError` if they differ from the examples'
        metadata."""
        inputs = [args[i] for i in self._kept] + self._constants
        for index, (given, form) in enumerate(zip(inputs, self._forms, strict=True)):
            if _form(given) != form:
                raise LoweringError(
                    f"running a compiled graph with input {index} as {_form(given)}",
                    found=f"it was compiled for {form}",
                    remedy="lower the graph again for these inputs",
                )
        return self._graph.bind(inputs)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that the graph holds into inputs: compiled in, each would be a copy that later writes do not
    change."""
    held: dict[str, list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(graph, str(node.target), None), Tensor):
            held.setdefault(str(node.target), []).append(node)
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for name, nodes in held.items():
        with graph.graph.inserting_before(first):
            placeholder = graph.graph.placeholder(f"held_{name}")
        for node in nodes:
            node.replace_all_uses_with(placeholder)
            first = first.next if node is first else first
            graph.graph.erase_node(node)
    graph.recompile()
    return [getattr(graph, name).detach() for name in held]


def _compile(graph: fx.GraphModule, examples: list[Tensor], background: bool, folder: Path) -> Steps[None]:
    """Write the shared object of a graph into a folder, and the description of its custom ops' calls, if it has any."""
    direct = DirectCalls(graph)
    # A worker whose job is given up may write there meanwhile.
    with TemporaryDirectory(prefix="core-", ignore_cleanup_errors=True) as made:
        if background:
            files = yield from generate_apart(graph, examples, direct.declarations, made)
        else:
            files = generate(graph, examples, direct.declarations, made)
        built = yield from build(files, folder / OBJECT, Graph)
        for found in Path(made).glob("*.wrapper.json"):
            shutil.move(found, folder / _CUSTOM_OPS)
    direct.write(folder, *((CONTAINER,) if built.contained else ()))
    if built.reason:
        (folder / _RETRIED).write_text(built.reason, encoding="utf-8")
    _compiled.extend([threading.get_ident()] * (2 if built.reason else 1))


def _load(folder: Path) -> tuple[Graph, str]:
    """Return the graph in a folder, and why it is in torch's own container that could do without; "" elsewhere."""
    graph, retried = Graph(folder / OBJECT, contained=CONTAINER in load_kernels(folder)), folder / _RETRIED
    return graph, retried.read_text(encoding="utf-8") if retried.exists() else ""


def factors() -> Mapping[str, str]:
    """Return the factors of a graph's machine code besides the graph, torch and this package."""
    import torch._inductor.config as config

    settings = config.save_config_portable(ignore_private_configs=False)
    settings.pop("aot_inductor.metadata", None)  # a compile notes there what it compiled for
    return {
        "compiler": _compiler_version(find_cxx_compiler() or ""),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),  # written into each parallel loop
        "inductor": hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16],
        "model": SOURCE_DIGESTS[MODEL.name][:16],
    }


@lru_cache(maxsize=4)
def _compiler_version(path: str) -> str:
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{path} {told.partition(chr(10))[0]}"


@lru_cache(maxsize=1)
def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model and a digest of its features: code is compiled for all of these."""
    try:
        text = cpuinfo.read_text()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    lines = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    found = {name.strip(): value.strip() for name, value in lines.items()}
    features = found.get("flags") or found.get("Features", "")
    return f"{found.get('model name', '')} {hashlib.sha256(features.encode()).hexdigest()[:16]}"


@contextmanager
def _counting() -> Iterator[Count]:
    before, thread = len(_compiled), threading.get_ident()
    yield lambda: _compiled[before:].count(thread)


AOT_INDUCTOR = KernelCompiler(name="aot_inductor", counting=_counting)
"""Counts graphs that were compiled. It keeps no files itself: core keeps its artefacts beside the compile cache."""
