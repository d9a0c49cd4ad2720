"""ONNX Runtime on the graph that torch.onnx exports, its cache bound as input and output of the same memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.common.peers import PeerRunner, PeerWork
from core_cpu.peers.static import ExportableStep, Step, cache_tensors, static_runner

_NOTE = "the graph is torch.onnx's export: no attention op of ONNX Runtime's own, the cache is written in place"


def session(work: PeerWork) -> PeerRunner:
    """Export the step, open a session, and run it."""

    def make(model: Any, cache: Any, ids: Tensor) -> Step:
        return _step(model, cache, ids, work.threads)

    runner = static_runner(work, make)
    runner.notes.append(_NOTE)
    return runner


class _Functional(ExportableStep):
    """The step that returns the cache too, since a graph of ONNX writes into no input."""

    def forward(self, ids: Tensor, held: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        tokens = super().forward(ids, held, tensors)
        return (tokens, *tensors)


def _step(model: Any, cache: Any, ids: Tensor, threads: int) -> Step:
    import onnxruntime

    held, tensors = cache.layers[0].cumulative_length, cache_tensors(cache)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.onnx"
        program = torch.onnx.export(
            _Functional(model, cache).eval(),
            (ids, held, [each.clone() for each in tensors]),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
        made = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokens = torch.empty(ids.shape[0], 1, dtype=torch.int64)
    names_in, names_out = [each.name for each in made.get_inputs()], [each.name for each in made.get_outputs()]

    def bound(ids: Tensor) -> Any:
        binding = made.io_binding()
        for name, tensor in zip(names_in, (ids, held, *tensors), strict=True):
            binding.bind_input(name, *_place(tensor))
        for name, tensor in zip(names_out, (tokens, *tensors), strict=True):
            binding.bind_output(name, *_place(tensor))
        return binding

    bindings: dict[int, Any] = {}

    def step(ids: Tensor) -> Tensor:
        binding = bindings.get(ids.data_ptr())
        if binding is None:
            binding = bindings[ids.data_ptr()] = bound(ids)
        made.run_with_iobinding(binding)
        held.add_(ids.shape[1])
        return tokens

    return step


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return the arguments of `bind_input` after the name: the memory as it is, which must outlive the binding."""
    import numpy as np

    kind = {torch.int64: np.int64, torch.float32: np.float32}[tensor.dtype]
    assert tensor.is_contiguous()
    return "cpu", 0, kind, list(tensor.shape), tensor.data_ptr()
