"""core_cpu/ops/recurrent.py and csrc/recurrent.cpp: judged against the references, over slots, tiles and threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpImplementation
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device
from core_cpu.ops.recurrent import IMPLEMENTATIONS
from tests.kernel_cases import CPU, DTYPES
from tests.recurrent_cases import OPS, calls, judged

pytestmark = pytest.mark.usefixtures("kernels")

BY_OP: dict[str, OpImplementation] = {each.op: each for each in IMPLEMENTATIONS}
EACH = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def refusal(op: CanonicalOp, call: dict[str, Any]) -> str | None:
    return BY_OP[op.qualified_name].condition(op.bind((), call))


def sample(op: CanonicalOp, name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return next(dict(each.kwargs) for each in op.samples(dtype, CPU) if each.name == name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EACH
def test_calls_agree_with_the_reference_and_give_the_same_bits_whatever_the_threads(
    op: CanonicalOp, dtype: torch.dtype
) -> None:
    fn: Callable[..., Any] = BY_OP[op.qualified_name].fn
    for name, call in calls(op, dtype):
        reason = refusal(op, call)
        if name.startswith("states of the dtype of") and dtype != torch.float32:
            assert reason is not None and "states are" in reason
            continue
        assert reason is None, (name, reason)
        results = []
        for count in (1, 2):
            own = copy.deepcopy(call)
            with threads(count):
                results.append((fn(**own), own["states"]))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
        with threads(1):
            judged(op, fn, call, CPU)


REFUSED: dict[str, tuple[CanonicalOp, Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "fp64": (OPS[0], lambda call: sample(OPS[0], "slots", torch.float64), "x is torch.float64"),
    "other weights": (
        OPS[0],
        lambda call: {**sample(OPS[0], "slots", torch.bfloat16), "weight": torch.ones(24, 4).half(), "bias": None},
        "weight is torch.float16",
    ),
    "keys of another dtype": (OPS[1], lambda call: {**call, "key": call["key"].bfloat16()}, "takes one dtype"),
    "transposed states": (OPS[1], lambda call: {**call, "states": call["states"].mT.contiguous().mT}, "one run of"),
    "narrow states": (OPS[2], lambda call: {**call, "states": call["states"].bfloat16()}, "states are torch.bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_take_is_refused(name: str) -> None:
    op, change, message = REFUSED[name]
    reason = refusal(op, change(sample(op, "slots")))
    assert reason is not None and message in reason


@EACH
@pytest.mark.parametrize("slot", [-1, 12])
def test_a_slot_that_is_not_there_raises(op: CanonicalOp, slot: int) -> None:
    for name in ("slots", "kept"):
        call = sample(op, "slots, written to others")
        call[name][2] = slot
        with pytest.raises(IndexError, match=f"slot {slot} of 12"):
            BY_OP[op.qualified_name].fn(**call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "kernels_used"),
    [
        ("qwen3_next", {"cpu_causal_conv1d_update", "cpu_gated_delta_rule"}),
        ("granitemoehybrid", {"cpu_causal_conv1d_update", "cpu_selective_state_update"}),
        ("mamba", {"cpu_causal_conv1d_update", "cpu_selective_state_update"}),
        ("zamba2", {"cpu_causal_conv1d_update", "cpu_selective_state_update"}),
    ],
)
def test_an_engine_runs_prompts_and_decode_by_the_kernels_in_compiled_graphs(
    model_type: str, kernels_used: set[str]
) -> None:
    """Each sequence of a batch gets the tokens that transformers gives for it alone."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    torch.manual_seed(0)
    loaded = build_model(tiny_config(model_type), torch_device=CPU, dtype=torch.float32)
    prompts = [list(range(3, 3 + length)) for length in (9, 2, 14)]
    loaded.model.generation_config.eos_token_id = None  # else of the type's defaults, which end some sequences early
    how = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        own = [loaded.model.generate(torch.tensor([p]), generation_config=how)[0, len(p) :].tolist() for p in prompts]
    config = EngineConfig(max_num_seqs=4, max_model_len=64, decode_buckets=(4,), sampling=("greedy",))
    with Engine(loaded, select_device("cpu"), config) as engine:
        report = engine.report()
        assert report.modes == {"decode": "compile", "prefill": "compile"}
        for traced in report.traces:
            assert kernels_used <= {choice.implementation for choice in traced.ops}
        found = engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert [list(each.token_ids) for each in found] == own
