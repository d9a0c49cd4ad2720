"""Rows of a static cache: each sequence gets what the model gives it alone, and faults in that are found."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import cache_utils

from core.engine.config import SamplingParams
from core.engine.inspect.probe import forward_logits, probe_tokens
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.static.model import StaticModel
from core.engine.static.rows import Rows
from core.engine.static.slots import Slots
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import Sequence
from core.host.selection import select_device
from tests.installed import needs_static_cache, skip_where
from tests.support import cpu

PROMPTS = {0: [5, 6, 7], 1: [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30], 2: [9]}


def static(
    model_type: str, *, dtype: torch.dtype = torch.float32, num_rows: int = 3, max_model_len: int = 48, **way: bool
) -> tuple[Any, StaticModel]:
    needs_static_cache(model_type)
    model = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=dtype).model
    how: dict[str, Any] = {"max_model_len": max_model_len, "masked": False, "packed": False, **way}
    return model, StaticModel(model, select_device("cpu"), EngineConfig(max_num_seqs=num_rows), **how)


@torch.no_grad()
def largest_error(model: Any, rows: StaticModel, *, num_steps: int = 12) -> float:
    """Return how far decode in rows is from the model's own forward of each sequence, over several steps."""
    texts = {row: [*prompt, *probe_tokens(model, num_steps, 40 + row)] for row, prompt in PROMPTS.items()}
    for row, prompt in PROMPTS.items():
        rows.prefill(prompt, row)
    errors = []
    for step in range(num_steps):
        done = [len(PROMPTS[row]) + step for row in PROMPTS]
        ids = torch.tensor([texts[row][done[row]] for row in PROMPTS])
        logits = rows.decode(ids, torch.tensor(done), torch.ones(len(PROMPTS), dtype=torch.bool))
        for row in PROMPTS:
            expected = forward_logits(model, texts[row][: done[row] + 1])[-1]
            errors.append(float((logits[row] - expected).norm() / expected.norm()))
    return max(errors)


# Alibi; an indexer's keys; a mask of chunks, with scales by position (packed); conv states, which no row is told from.
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model_type", "way"), [("bloom", {}), ("deepseek_v32", {}), ("doge", {}), ("llama4_text", {"packed": True})]
)
def test_rows_of_different_lengths_give_what_the_model_gives_alone(model_type: str, way: dict[str, bool]) -> None:
    model, rows = static(model_type, **way)
    assert (rows.num_rows, rows.why_one) == (3, "")
    assert 0 < largest_error(model, rows) < 1e-5
    rows.close()


@pytest.mark.slow
def test_half_precision_is_judged_by_its_own_rounding() -> None:
    model, rows = static("falcon", dtype=torch.bfloat16)
    assert rows.num_rows == 3
    assert largest_error(model, rows) < 0.03
    rows.close()


@pytest.mark.slow
def test_layers_with_states_keep_those_of_rows_that_are_not_in_a_step() -> None:
    """No type of transformers is on this route with states that rows hold, so one that can be paged stands for it."""
    model, rows = static("lfm2")
    assert rows.rows is not None and rows.rows.keeps_states, rows.why_one
    assert 0 < largest_error(model, rows) < 1e-5
    rows.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("roformer", "it computes something of the length of the cache, and that of each row is another"),
        ("qwen4_exp_text", "keeps 'indexer_position_ids', of which rows are not known"),
    ],
)
def test_a_model_that_cannot_tell_rows_apart_has_one_and_says_why(model_type: str, why: str) -> None:
    kept = "indexer_position_ids" in inspect.getsource(cache_utils)
    skip_where(model_type == "qwen4_exp_text" and not kept, "keeps no positions of an indexer")
    model, one = static(model_type)
    assert (one.num_rows, one.rows) == (1, None)
    assert why in one.why_one
    prompt = PROMPTS[1]
    with torch.no_grad():  # and that one is right
        first = one.prefill(prompt)
        torch.testing.assert_close(first[0], forward_logits(model, prompt)[-1], rtol=1e-3, atol=1e-4)


def test_a_length_that_decides_far_beyond_the_probes_is_found() -> None:
    """Llama 4 scales queries by the position from the 8,192nd token on: no probe is so long."""
    _, rows = static("llama4_text")
    assert rows.num_rows == 1
    assert rows.why_one.startswith("it computes something of the length of the cache")


def test_a_context_too_short_for_the_check_has_one_row() -> None:
    _, one = static("bloom", max_model_len=8)
    assert "a context of 8 tokens is too short" in one.why_one


def stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import StaticLayer

    monkeypatch.setattr(StaticLayer, "reset", lambda self: None)  # a new sequence goes on behind the one before


def other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rows.one
    monkeypatch.setattr(Rows, "one", lambda self, row: one(self, 0))  # all prompts are written to the first row


def idle_row(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Rows.begin

    def begin_wrongly(self: Rows, positions: torch.Tensor, active: torch.Tensor | None) -> Any:
        assert active is not None
        return begin(self, torch.where(active, positions, 0), active)  # a row that waits is written at its beginning

    monkeypatch.setattr(Rows, "begin", begin_wrongly)


def one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Rows.begin

    def begin_wrongly(self: Rows, positions: torch.Tensor, active: torch.Tensor | None) -> Any:
        return begin(self, positions.max().expand_as(positions).contiguous(), active)

    monkeypatch.setattr(Rows, "begin", begin_wrongly)


@pytest.mark.cases(2)
@pytest.mark.parametrize("fault", [stale_row, other_row, idle_row, one_length])
@pytest.mark.parametrize("way", [{}, {"packed": True}], ids=["rows", "packed"])
def test_planted_faults_are_rejected(fault: Any, way: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fault(patch)
        if fault is stale_row:
            patch.setattr(StaticModel, "_check_one", check_without_reset(StaticModel._check_one))
        _, rows = static("gptj", max_model_len=250, **way)
    assert rows.num_rows == 1 and "differs from its own forward by" in rows.why_one, rows.why_one


def check_without_reset(check: Any) -> Any:
    """Empty the cache before transformers' own row is checked: that check must not find the fault first."""

    def checked(self: StaticModel) -> None:
        check(self)
        for layer in self._cache.layers:
            layer.cumulative_length.zero_()

    return checked


@pytest.mark.slow
def test_idle_rows_keep_their_states() -> None:
    _, rows = static("lfm2")
    assert rows.rows is not None
    rows.prefill([5, 6, 7], 0)
    rows.prefill([8, 9], 1)
    before = [state[1].clone() for state in rows.rows.states]
    with torch.no_grad():
        rows.decode(torch.tensor([1, 1]), torch.tensor([3, 2]), torch.tensor([True, False]))
    assert all(torch.equal(state[1], kept) for state, kept in zip(rows.rows.states, before, strict=True))
    rows.close()


@pytest.mark.slow
def test_masks_of_transformers_are_its_own_again_when_the_last_rows_are_closed() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.masking_utils import eager_mask, sdpa_mask

    def are_its_own() -> bool:
        return (masks["sdpa"], masks["eager"]) == (sdpa_mask, eager_mask)

    assert are_its_own()
    first, second = static("gptj")[1], static("gptj")[1]
    first.close()
    first.close()
    assert not are_its_own()
    assert torch.equal(masks["sdpa"](1, 2, 4, q_offset=torch.tensor(1)), sdpa_mask(1, 2, 4, q_offset=1))
    second.close()
    assert are_its_own()


def sequences(count: int) -> list[Sequence]:
    return [Sequence(index, [3, 4], SamplingParams()) for index in range(count)]


def test_slots_give_the_first_free_row_and_close_gaps() -> None:
    slots, (first, second, third) = Slots(2, keeps_states=False), sequences(3)
    assert slots.join(first) and slots.join(second) and slots.join(first)  # an interrupted join is repeated
    assert not slots.join(third) and not slots.grow(third, 1)
    assert [row for row, _ in slots.holders] == [0, 1]
    slots.release(first)
    slots.release(first)
    assert slots.gap() == (1, 0) and slots.num_used == 2
    slots.moved(1, 0)
    assert slots.gap() is None and slots.holders == [(0, second)] and second.slot == 1
    assert slots.join(third) and third.slot == 2


def test_a_row_whose_release_was_interrupted_is_free() -> None:
    slots, (first, second) = Slots(1, keeps_states=False), sequences(2)
    assert slots.join(first)
    first.slot = 0
    assert slots.num_used == 0 and slots.join(second)


def test_rows_are_as_many_as_memory_holds(caplog: pytest.LogCaptureFixture) -> None:
    needs_static_cache("bloom")
    model = build_model(tiny_config("bloom"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    how: Any = {"max_model_len": 48, "masked": False, "packed": False}
    config = EngineConfig(max_num_seqs=8, cache_tokens=3 * 48 + 1)
    with caplog.at_level("WARNING"):
        static_model = StaticModel(model, cpu(), config, **how)
    assert static_model.num_rows == 3
    static_model.close()
    assert "static cache for 3 of 8 sequences at once" in caplog.text and "cache_tokens=145" in caplog.text
