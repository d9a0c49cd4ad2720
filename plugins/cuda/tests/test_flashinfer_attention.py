"""core_cuda/flashinfer/attention.py on a stand-in: one plan for a bucket's bounds serves steps of any lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from tests.attention_cases import CASES, judged, steps
from tests.kernel_cases import CPU

pytest.importorskip("triton", reason="needs triton")
from fake_flashinfer import plant

from core_cuda.flashinfer import attention, planning

pytestmark = [pytest.mark.interpreter, pytest.mark.parametrize("kernel_device", ["interpreter"], indirect=True)]
BF16 = torch.bfloat16
SERVED = ("prompts", "chunks", "padding", "window over tiles", "both ways in a window", "soft-cap", "pages of 24")
SERVED = (*SERVED, "three heads of one", "single tokens", "padding alone", "lengths of int64")


@pytest.fixture(autouse=True)
def _library(kernel_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tmp_path)


def call_of(name: str, **options: Any) -> dict[str, Any]:
    return steps(**{"heads": (4, 2), **CASES[name], "dtype": BF16, "sizes": (64, 64), **options})


def kernel(op: Any, backend: str) -> Any:
    return (attention.ATTENTIONS if op is ATTENTION else attention.ROTARY_ATTENTIONS)[backend][0]


def reason(op: Any, backend: str, call: dict[str, Any]) -> str | None:
    condition = (attention.ATTENTIONS if op is ATTENTION else attention.ROTARY_ATTENTIONS)[backend][1]
    found: str | None = condition(op.bind((), call))
    return found


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("name", SERVED)
def test_attention_agrees_with_the_reference(name: str, backend: str) -> None:
    call = call_of(name)
    if backend == "fa3" and "window" in call:
        assert "left the window" in str(reason(ATTENTION, backend, call))
        return
    assert reason(ATTENTION, backend, call) is None
    judged(ATTENTION, kernel(ATTENTION, backend), call, CPU)


DECODE = {
    "one": (((1, 300),), {}),
    "some": (((1, 7), (1, 300), (1, 1)), {}),
    "padded": (((1, 90), (0, 0), (0, 0)), {"padding": (2, 0)}),
    "in a window": (((1, 290), (1, 40)), {"window": 100}),
    "more rows than sequences": (((1, 150), (1, 20)), {"padding": (3, 0)}),
    "a sequence without a token": (((1, 150), (0, 20), (1, 30)), {"padding": (1, 0)}),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode_is_cut_into_parts_where_programs_would_be_idle(name: str) -> None:
    lens, options = DECODE[name]
    call = steps(lens, dtype=BF16, heads=(4, 2), sizes=(64, 64), page=16, **options)
    run = kernel(ATTENTION, "fa2")
    judged(ATTENTION, lambda **c: run(**c, max_query_len=1), call, CPU)
    (planned,) = planning._PLANNED.values()
    assert (planned.chunks > 1) == (len(call["query"]) == len(call["seq_lens"]))


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_one_plan_serves_steps_of_all_lengths(backend: str) -> None:
    for lens in (((40, 90), (1, 60)), ((1, 1), (40, 40)), ((20, 64), (21, 90)), ((0, 0), (41, 80))):
        call = steps(lens, dtype=BF16, heads=(4, 2), sizes=(64, 64), page=16)
        table = torch.zeros(2, 8, dtype=torch.int32)
        table[:, : call["block_table"].shape[1]] = call["block_table"]
        judged(ATTENTION, kernel(ATTENTION, backend), {**call, "block_table": table}, CPU)
    assert len(planning._PLANNED) == 1


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_rotation_before_it(backend: str) -> None:
    call = call_of("padding")
    angles = torch.outer(torch.arange(len(call["query"])).float(), 1e4 ** (-torch.arange(32) / 32))
    call |= {"cos": angles.cos().to(BF16), "sin": angles.sin().to(BF16)}
    assert reason(ROTARY_ATTENTION, backend, call) is None
    judged(ROTARY_ATTENTION, kernel(ROTARY_ATTENTION, backend), call, CPU)


def test_a_step_without_tokens() -> None:
    call = call_of("prompts")
    call |= {name: call[name][:0] for name in ("query", "key", "value", "slot_mapping")}
    call["query_starts"] = torch.zeros_like(call["query_starts"])
    assert kernel(ATTENTION, "fa3")(**call).shape == (0, 4, 64)


REFUSED = {
    "chunks": ({"window": 9, "chunked": True}, "each token sees its own chunk"),
    "sinks": ({"sinks": torch.ones(4)}, "sinks"),
    "features": ({"sizes": (80, 80)}, "heads have 80"),
    "value": ({"sizes": (64, 32)}, "64 and 32"),
    "dtype": ({"dtype": torch.float32}, "query is torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_library_lacks_is_refused_with_the_reason(name: str) -> None:
    options, wanted = REFUSED[name]
    assert wanted in str(reason(ATTENTION, "fa2", call_of("prompts", **options)))


def test_caches_of_codes_and_of_other_strides_are_refused() -> None:
    call = call_of("prompts")
    coded = {name: call[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
    assert "codes" in str(reason(ATTENTION, "fa2", call | coded))
    merged = torch.zeros(*call["value_cache"].shape[:3], 128, dtype=BF16)
    assert "strides" in str(reason(ATTENTION, "fa2", call | {"value_cache": merged[..., :64]}))


def test_another_gpu_has_no_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.launching, "capability", lambda: (10, 0))
    assert "9.0" in str(reason(ATTENTION, "fa3", call_of("prompts")))
    assert reason(ATTENTION, "fa2", call_of("prompts")) is None


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_plan_that_is_laid_out_otherwise_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = planning.presence.load().BatchPrefillWithPagedKVCacheWrapper
    real = getattr(wrapper, f"_plan_{backend}")

    def shuffled(self: Any, *args: Any) -> list[int]:
        found: list[int] = real(self, *args)
        return (
            [*found[1:5], found[0], *found[5:]] if backend == "fa3" else [*found[:4], found[8], *found[4:8], *found[9:]]
        )

    def longer(self: Any, *args: Any) -> list[int]:
        return [*real(self, *args), 0]

    for changed in (shuffled, longer):
        monkeypatch.setattr(wrapper, f"_plan_{backend}", changed)
        with pytest.raises(RuntimeError, match=r"laid out otherwise than that of 0\.6\.12"):
            kernel(ATTENTION, backend)(**call_of("chunks"))
    assert not planning._PLANNED


def test_only_what_is_built_ahead_and_may_win_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, decode = (ATTENTION.bind((), call_of("prompts") | {"max_query_len": n}) for n in (0, 1))
    assert "not built ahead" in str(attention.timed("fa3")(prompt))
    monkeypatch.setattr(attention, "not_ahead", lambda name: None)
    assert attention.timed("fa3")(prompt) is None and attention.timed("fa2")(decode) is None
    assert "one new token" in str(attention.timed("fa3")(decode))
    assert "FlashAttention 3" in str(attention.timed("fa2")(prompt))
    assert attention.timed("fa2")(ATTENTION.bind((), call_of("window over tiles"))) is None


def test_bounds_tell_plans_apart() -> None:
    run = kernel(ATTENTION, "fa2")
    run(**call_of("prompts"))
    (bounds,) = (each[2] for each in planning._PLANNED)
    run(**call_of("prompts", window=9))
    assert {each[2] for each in planning._PLANNED} == {bounds, replace(bounds, window=9)}
