"""Area models: a Llama that is cut for several processes gives the logits of the whole one, in each mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from core.common.numerics import Fp64Mode
from core.compilation.capture.inputs import InputSpec
from core.compilation.compile import capture, compile
from core.compilation.options import CompileOptions
from core.compilation.program import Program
from core.device import Device, Mode
from core.engine.models.distributed import Processes
from core.engine.models.loading import build_model
from core.engine.models.sharding import shard_model
from core.engine.models.tiny import tiny_config
from core.errors import UsageError
from core_conformance.cases.calls.programs import lowering_of
from core_conformance.cases.processes.part import Part
from core_conformance.dtypes import working_dtype
from core_conformance.trial import Skip, Trial

NUM_TOKENS = 8
_CALLS = 4
_TRACED = ("full", "piecewise", "compile")


def parts(device: Device) -> Iterator[Part]:
    """Yield a part for each mode."""
    for mode in get_args(Mode):
        declared = mode in (*device.capabilities.modes, "off")
        yield Part(
            id=f"models/processes/llama/{mode}",
            what="logits of a Llama, cut by its plan, with the device's passes where the mode traces",
            run=partial(judge_logits, mode=mode),
            not_supported="" if declared else f"the device does not declare mode {mode!r}",
        )


def judge_logits(trial: Trial, place: Processes, *, mode: Mode) -> None:
    """Judge the logits of changing prompts against the whole model, which each process has too."""
    device = trial.device
    loaded = build_model(tiny_config("llama"), torch_device=device.torch_device, dtype=working_dtype(device))
    whole = loaded.model
    try:
        shard = shard_model(copy.deepcopy(whole))
    except UsageError as error:
        raise Skip(f"{place.size} processes can't share this model: {error.found}") from None
    exact = copy.deepcopy(whole).cpu().double()
    with _program(device, shard, mode) as program:
        for number in range(_CALLS):
            generator = torch.Generator().manual_seed(trial.seed + number)
            ids = torch.randint(3, 64, (1, NUM_TOKENS), generator=generator)
            placed = ids.to(device.torch_device)
            result, eager = program(input_ids=placed), _logits(whole, placed)
            with Fp64Mode():
                wanted = _logits(exact, ids)
            trial.judge(f"prompt {number}, logits", result, eager, wanted)
        report = program.report()
        trial.same("the mode", dict(report.modes), {"main": mode})
        if mode != "off":
            trial.same("calls without a graph", dict(report.fallbacks), {})


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _program(device: Device, shard: Any, mode: Mode) -> Program:
    traced = mode in _TRACED
    return (compile if traced else capture)(
        lambda input_ids: _logits(shard, input_ids),
        device,
        inputs={"input_ids": InputSpec((1, NUM_TOKENS), torch.int64)},
        options=CompileOptions(mode=mode, lowering=lowering_of(device) if traced else None),
    )
