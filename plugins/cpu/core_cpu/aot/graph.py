"""Graphs that AOTInductor compiled, run without Python's lock (csrc/graph.cpp): other threads go on meanwhile, such as
those of a server.

torch's own binding holds the lock for a whole step.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.common.lowering import Unavailable
from core_cpu import extension
from core_cpu.own_ops import LIBRARY

_SOURCE = "graph"
CONTAINER = "container"
"""The file in csrc/ that opens graphs which were compiled with torch's own container around them."""
LIBRARY.define("step_output(int step, int index) -> Tensor")


class Graph:
    """A shared object of AOTInductor, loaded; as long as the graph or a step of it lives."""

    def __init__(self, path: Path, *, contained: bool = False) -> None:
        """Raise `OSError` with the reason where the object, or what runs it, can't be loaded.

        contained: it has torch's own container around it.
        """
        api = _api()
        opens, failure = _container() if contained else (api.core_cpu_graph_open, api.core_cpu_failure)
        self._handle = opens(str(path).encode())
        if not self._handle:
            raise OSError(f"{path} can't be loaded: {failure().decode(errors='replace')}")
        weakref.finalize(self, api.core_cpu_graph_close, self._handle).atexit = False

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Return what runs the graph on these tensors, as they are when it is called, without autograd.

        It returns fresh tensors, or views of inputs; for one thread at a time. Raises `RuntimeError` where a run fails.
        """
        return _Step(self._handle, inputs).run


class _Step:
    """A graph with its inputs."""

    def __init__(self, graph: int, inputs: Sequence[Tensor]) -> None:
        api = _api()
        tensors = (ctypes.c_void_p * len(inputs))(*[each._cdata for each in inputs])
        handle = api.core_cpu_step_open(graph, tensors, len(inputs))
        if not handle:
            raise RuntimeError(f"a compiled graph can't be bound to its inputs: {_failure(api)}")
        weakref.finalize(self, api.core_cpu_step_close, handle).atexit = False
        run, output = api.core_cpu_step_run, torch.ops.core_cpu.step_output.default

        def step() -> tuple[Tensor, ...]:
            count = run(handle)
            if count < 0:
                raise RuntimeError(f"a compiled graph failed: {_failure(api)}")
            return tuple([output(handle, index) for index in range(count)])

        self._step = step

    def run(self) -> tuple[Tensor, ...]:
        """Run the graph."""
        return self._step()


def require(*, contained: bool = False) -> None:
    """Raise `Unavailable` with the reason where no graph can be run here; contained: none in torch's own container."""
    _api()
    if contained:
        _container()


@cache
def _api() -> Any:
    """Return the C functions; raise `Unavailable` where they can't be built or loaded."""
    if reason := extension.load(_SOURCE):
        raise Unavailable(reason)
    api = ctypes.CDLL(None)  # the extension makes its C functions known in the whole process
    api.core_cpu_failure.restype = ctypes.c_char_p
    for name in ("graph_open", "step_open"):
        getattr(api, f"core_cpu_{name}").restype = ctypes.c_void_p
    for name in ("graph_close", "step_close", "step_run"):
        getattr(api, f"core_cpu_{name}").argtypes = [ctypes.c_void_p]
    api.core_cpu_step_open.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    api.core_cpu_graph_open.argtypes = [ctypes.c_char_p]
    api.core_cpu_step_run.restype = ctypes.c_int64
    return api


@cache
def _container() -> tuple[Any, Any]:
    """Return the C functions that open a graph with torch's container, and tell why that failed; raise `Unavailable`
    where they can't be built or loaded."""
    if reason := extension.load(CONTAINER):
        raise Unavailable(reason)
    if extension.ending(CONTAINER) != extension.ending(_SOURCE):  # as after an upgrade of the compiler
        raise Unavailable(f"{CONTAINER} and {_SOURCE} share C++ objects and were not built alike; start again")
    api = ctypes.CDLL(None)
    opens, failure = api.core_cpu_container_open, api.core_cpu_container_failure
    opens.restype, opens.argtypes, failure.restype = ctypes.c_void_p, [ctypes.c_char_p], ctypes.c_char_p
    return opens, failure


def _failure(api: Any) -> str:
    found: bytes = api.core_cpu_failure()
    return found.decode(errors="replace")
