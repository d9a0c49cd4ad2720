"""Inductor's part of a compile: it writes the C++ of a graph, in this process or in one of torch's compile workers."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import pickle
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from core.common.ops.declaration import declared_ops
from core.common.under_way import Steps
from core.errors import one_line
from core_cpu.aot.torch_state import TorchState
from core_cpu.extension import instructions

log = logging.getLogger("core.cpu")

OBJECT = "graph.so"
SETTING = "aot_inductor.custom_ops_to_c_shims"
"""The setting of Inductor that names ops with C functions, and declares these."""
Declarations = Mapping[OpOverload, str]
"""C functions that ops are called by, each as a declaration in C."""
_INDUCTOR = threading.Lock()
"""Held by the thread for which Inductor is changed: the change is the whole process's."""
_OF_GRAPHS = ("core_cpu.", "core.common.ops.")
"""The beginnings of the names of modules that declare ops."""
_NUM_WORKERS = min(max((os.cpu_count() or 1) // 2, 1), 4)
"""Workers at once; one takes up to 1 GiB of memory, and the compilers of C++ want cores too."""
_LONGEST_S = 900.0
"""Seconds after which a worker counts as hung."""
_IDLE_S = 30.0
"""Seconds after which workers without work are ended."""


def generate(graph: fx.GraphModule, examples: Sequence[Tensor], declarations: Declarations, folder: str) -> list[str]:
    """Write the C++ of a graph below a folder, and return the paths of the files.

    graph: its placeholders are tensors, and it holds none. examples: their metadata counts.
    """
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    copy = fx.GraphModule(graph, nodes)  # the compiler changes its input
    with torch.no_grad(), _quiet(), _known_instructions():
        generated: Any = torch._inductor.aot_compile(copy, tuple(examples), options=_options(folder, declarations))
    return [name for name in generated if isinstance(name, str)]


def generate_apart(
    graph: fx.GraphModule, examples: Sequence[Tensor], declarations: Declarations, folder: str
) -> Steps[list[str]]:
    """Do the same in a worker, and pause while it works; here, where a worker can't read the graph or fails at it.

    It pauses before it begins, too: who looks for what was compiled before need not wait for a worker's start.
    """
    yield _at_once
    try:
        job = _Job.of(graph, examples, declarations, folder)
    except Exception as error:
        log.info("a graph is compiled in this process, as it can't be told to a worker: %s", one_line(str(error)))
        return generate(graph, examples, declarations, folder)
    try:
        future = _WORKERS.submit(job)
        end = time.monotonic() + _LONGEST_S
        try:
            yield lambda: future.done() or time.monotonic() > end
        except GeneratorExit:  # the worker goes on, and makes the folder again in which it writes
            future.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
            raise
        return future.result(timeout=max(end - time.monotonic(), 0.0))
    except Exception as error:  # whatever goes wrong there goes wrong here too, or is the worker's own affair
        log.info("a graph is compiled in this process, as a worker fails at it: %s", one_line(str(error)))
        return generate(graph, examples, declarations, folder)


def _at_once() -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What a worker is told, as values that can be pickled."""

    #: those that declare ops and functions which graphs call
    modules: tuple[str, ...]
    #: by torch's pickler of graphs
    graph: bytes
    #: by Python's pickler: by the place of a node the Python function that it calls, or the name of the op whose
    #: reference that is. torch's pickler takes functions of torch alone, Python's none that has a check before it
    functions: bytes
    #: bytes of each piece of memory
    memories: tuple[int, ...]
    #: of each example: dtype, memory, offset, shape, stride
    examples: tuple[tuple[torch.dtype, int, int, tuple[int, ...], tuple[int, ...]], ...]
    #: by namespace, name and overload of an op
    declarations: Mapping[tuple[str, str, str], str]
    folder: str
    settings: Mapping[str, Any]
    state: TorchState

    @classmethod
    def of(cls, graph: fx.GraphModule, examples: Sequence[Tensor], declarations: Declarations, folder: str) -> _Job:
        """Return the job of writing a graph's C++; raise where the graph can't be pickled."""
        import torch._inductor.config as config
        from torch.fx._graph_pickler import GraphPickler, Options

        nodes = fx.Graph()
        nodes.output(nodes.graph_copy(graph.graph, {}))
        functions: dict[int, FunctionType | str] = {}
        references = {op.reference: name for name, op in declared_ops().items()}
        for place, node in enumerate(nodes.nodes):
            node.meta.clear()
            if isinstance(node.target, FunctionType) and node.target.__module__.partition(".")[0] != "torch":
                functions[place] = references.get(node.target, node.target)
                node.target = torch.add  # any that can be pickled
        storages = [tensor.untyped_storage() for tensor in examples]
        memories = {storage.data_ptr(): storage.nbytes() for storage in storages}
        places = {address: place for place, address in enumerate(memories)}
        described = (
            (each.dtype, places[storage.data_ptr()], int(each.storage_offset()), tuple(each.shape), each.stride())
            for each, storage in zip(examples, storages, strict=True)
        )
        return cls(
            modules=tuple(name for name in sys.modules.copy() if name.startswith(_OF_GRAPHS)),
            graph=GraphPickler.dumps(fx.GraphModule(torch.nn.Module(), nodes), Options(ops_filter=None)),
            functions=pickle.dumps(functions),
            memories=tuple(memories.values()),
            examples=tuple(described),
            declarations={(op.namespace, op._opname, op._overloadname): text for op, text in declarations.items()},
            folder=folder,
            settings=config.save_config_portable(ignore_private_configs=False),
            state=TorchState.read(),
        )

    def run(self) -> list[str]:
        """Do the job, in the worker, unless it was given up.

        Memory is asked for and never touched, so it takes none.
        """
        if not os.path.isdir(self.folder):
            return []
        import torch._inductor.config as config
        from torch.fx._graph_pickler import GraphPickler

        for name in self.modules:
            importlib.import_module(name)
        self.state.apply()
        config.load_config(dict(self.settings))
        memories = [torch.UntypedStorage(num_bytes) for num_bytes in self.memories]
        examples = [
            torch.empty(0, dtype=dtype).set_(memories[place], offset, shape, stride)
            for dtype, place, offset, shape, stride in self.examples
        ]
        named = ((getattr(torch.ops, namespace), name, which) for namespace, name, which in self.declarations)
        ops = [getattr(getattr(namespace, name), which) for namespace, name, which in named]
        graph: Any = GraphPickler.loads(self.graph, FakeTensorMode(shape_env=ShapeEnv()))
        called = list(graph.graph.nodes)
        for place, function in pickle.loads(self.functions).items():
            called[place].target = declared_ops()[function].reference if isinstance(function, str) else function
        graph.recompile()
        return generate(graph, examples, dict(zip(ops, self.declarations.values(), strict=True)), self.folder)


class _Workers:
    """torch's compile workers, which start with the first job and end after the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Any = None
        self._num_jobs = 0
        self._idle: threading.Timer | None = None

    def submit(self, job: _Job) -> Future[list[str]]:
        """Give a worker a job."""
        from torch._inductor.compile_worker.subproc_pool import SubprocPool

        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            if self._pool is None:
                self._pool = SubprocPool(_NUM_WORKERS)
            try:
                future: Future[list[str]] = self._pool.submit(job.run)
            except Exception:
                self._pool = None  # its processes have ended, by whomever: the next job starts others
                raise
            self._num_jobs += 1
        future.add_done_callback(self._finished)
        return future

    def end(self) -> None:
        """End the workers; jobs under way fail."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _finished(self, _: Future[list[str]]) -> None:
        with self._lock:
            self._num_jobs -= 1
            if not self._num_jobs and self._pool is not None:
                self._idle = threading.Timer(_IDLE_S, self._end_if_idle)
                self._idle.daemon = True
                self._idle.start()

    def _end_if_idle(self) -> None:
        with self._lock:
            pool = None if self._num_jobs else self._pool
            if pool is not None:
                self._pool = None
        if pool is not None:
            pool.shutdown()


_WORKERS = _Workers()
atexit.register(_WORKERS.end)  # before any program registers its end, which comes first then, and gives no more jobs


def _options(folder: str, declarations: Declarations) -> dict[str, Any]:
    """Return settings of Inductor: C++ and no shared object goes into the folder, and as little as is needed."""
    import torch._inductor.config as config

    options: dict[str, Any] = {
        "aot_inductor.output_path": os.path.join(folder, OBJECT),
        "aot_inductor.package": True,
        "aot_inductor.package_cpp_only": True,
        # Lines of the generated code, for debuggers, and checks of what ops of this project return.
        "aot_inductor.enable_line_tables": False,
        "size_asserts": False,
        # Inductor tries an instruction set by compiling and loading a library, 2 to 3 s on a small machine. A set that
        # the compiler does not know is an error of the compile.
        "cpp.vec_isa_ok": True,
        # Two precompiled headers take 10 s and 300 MB, and save about 1 s of each graph.
        "aot_inductor.precompile_headers": False,
        SETTING: {op: [text] for op, text in declarations.items()},
    }
    # Not every version of torch has all of them.
    return {name: value for name, value in options.items() if _has(config, name)}


def _has(config: Any, name: str) -> bool:
    """Return whether Inductor has a setting of this name, such as `cpp.threads`."""
    return name in config.save_config_portable(ignore_private_configs=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
        yield


@contextmanager
def _known_instructions() -> Iterator[None]:
    """Spare Inductor its trials of instructions that the plugin's kernels, loaded by now, are compiled with.

    It asks torch what the processor has, and then compiles and loads a library for each set: 1 to 2 s, in which nothing
    else goes on. The setting `cpp.vec_isa_ok` spares it the first of these only. One thread at a time: the change of a
    second one would be put back to that of the first.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    with _INDUCTOR:
        compiles, known = VecISA.check_build, instructions()

        def check_build(self: VecISA, code: str) -> bool:
            return known.issuperset(self._arch_flags.split()) or compiles(self, code)

        VecISA.check_build = check_build  # type: ignore[method-assign]
        try:
            yield
        finally:
            VecISA.check_build = compiles  # type: ignore[method-assign]
