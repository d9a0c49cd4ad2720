"""torch's Inductor without `core`: frozen weights through torch.compile, and AOTInductor with its defaults."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.common.peers import PeerRunner, PeerWork
from core_cpu.peers.static import ExportableStep, Step, cache_tensors, eager_step, static_runner


def freezing(work: PeerWork) -> PeerRunner:
    """Run torch.compile with the weights as constants, which oneDNN packs.

    Set for the whole process: `options={"freezing": True}` does not reach Dynamo, which must keep parameters apart.
    """
    import torch._inductor.config as config

    config.freezing = True

    def make(model: Any, cache: Any, ids: Tensor) -> Step:
        step: Step = torch.compile(eager_step(model, cache), dynamic=False)
        return step

    return static_runner(work, make)


def ahead_of_time(work: PeerWork) -> PeerRunner:
    """Run the model as torch.export and AOTInductor make it, with their defaults."""
    return static_runner(work, _package)


def _package(model: Any, cache: Any, ids: Tensor) -> Step:
    held, tensors = cache.layers[0].cumulative_length, cache_tensors(cache)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(ExportableStep(model, cache).eval(), (ids, held, tensors), strict=False)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(Path(folder) / "step.pt2"))
        program = torch._inductor.aoti_load_package(path)

    def step(ids: Tensor) -> Tensor:
        tokens: Tensor = program(ids, held, tensors)
        held.add_(ids.shape[1])
        return tokens

    return step
