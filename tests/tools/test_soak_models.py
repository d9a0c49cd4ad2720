"""tools/soak/soak_models.py: short soaks, what they call a fault, and mistakes of the engine that they find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import soak_models
import staggered
from core.compilation.options import CompileOptions
from core.engine.paged.blocks import FIRST_SLOT
from core.engine.paged.tables import BlockTables
from core.engine.serve import handing
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.sequence import Sequence
from core.host.selection import select_device
from soak_models import CONFIG, TYPES, soak
from staggered import EVENTS, Job
from tests.marks import slow_except
from tests.recording import acme

EAGER = replace(CONFIG, options=CompileOptions(mode="off"))
NO_STATE_SHARED = {"prefix hits", "accepted", "rejected"}
STATIC = {"preempted", "chunked", *NO_STATE_SHARED}
MISSING = {
    **dict.fromkeys(TYPES, NO_STATE_SHARED),
    **{each: set[str]() for each in ("llama4_text", "deepseek_v32", "glm_moe_dsa")},
    "diffllama": STATIC,
    "recurrent_gemma": STATIC | {"mixed"},
}
"""Model type -> the events that its route does not offer."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("model_type", slow_except(["lfm2", "deepseek_v32", "diffllama"], "lfm2", "diffllama"))
def test_a_short_soak_has_every_event_that_the_route_offers_and_no_fault(model_type: str) -> None:
    row = soak(model_type, select_device("cpu"), 20, config=EAGER)
    assert row.faults == []
    assert set(row.missing) == MISSING[model_type]
    assert row.line().startswith(f"| `{model_type}` | {row.route} | 20 |") and row.line().endswith("| yes |")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_two_hundred_requests_in_graphs_get_what_each_gets_alone(model_type: str) -> None:
    row = soak(model_type, acme(), 200)
    assert row.faults == []
    assert set(row.missing) == MISSING[model_type]
    assert ("off" in row.modes) is (model_type == "recurrent_gemma")  # which keeps its state in Python


def one_slot_for_all(engine: Engine) -> None:
    tables = cache_of(engine)
    tables._slots[:] = [FIRST_SLOT] * len(tables._slots)


def joining(engine: Engine, change: Callable[[Sequence], None]) -> None:
    tables: Any = cache_of(engine)
    join = tables.join

    def wrong(sequence: Sequence) -> bool:
        found: bool = join(sequence)
        if found and len(sequence) > 2:
            change(sequence)
        return found

    tables.join = wrong


def state_of_before(engine: Engine) -> None:
    """Who comes back after a preemption goes on where it was, on whatever its slot holds now."""

    def change(sequence: Sequence) -> None:
        if sequence.num_preemptions:
            sequence.num_computed = len(sequence) - 1

    joining(engine, change)


def state_not_reset(engine: Engine) -> None:
    def change(sequence: Sequence) -> None:
        sequence.num_computed = max(sequence.num_computed, 1)

    joining(engine, change)


def chunk_border_off_by_one(engine: Engine) -> None:
    scheduler: Any = engine._scheduler
    schedule, seen = scheduler.schedule, set[int]()

    def wrong() -> Any:
        for sequence in scheduler._running:
            if sequence.in_prompt and sequence.num_computed > 1 and sequence.index not in seen:
                seen.add(sequence.index)
                sequence.num_computed -= 1
        return schedule()

    scheduler.schedule = wrong


def cache_of(engine: Engine) -> BlockTables:
    cache = engine._runner.cache
    assert isinstance(cache, BlockTables)
    return cache


MISTAKES = (one_slot_for_all, state_of_before, state_not_reset, chunk_border_off_by_one)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model_type", "mistake"),
    slow_except(
        [(model_type, mistake) for model_type in ("lfm2", "mamba2", "falcon_h1", "jamba") for mistake in MISTAKES],
        *(("mamba2", mistake) for mistake in MISTAKES),
    ),
)
def test_a_state_that_is_not_the_sequence_s_own_shows(model_type: str, mistake: Callable[[Engine], None]) -> None:
    row = soak(model_type, select_device("cpu"), 20, config=EAGER, spoil=mistake)
    assert any(fault.startswith("request") for fault in row.faults), row
    assert row.line().endswith("| no |")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", slow_except(["llama4_text", "deepseek_v32"], "llama4_text"))
def test_rejected_drafts_that_stay_show(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "accept", lambda drafts, tokens: [*drafts, tokens[-1]])
    row = soak(model_type, select_device("cpu"), 20, config=EAGER)
    assert any(fault.startswith("request") for fault in row.faults), row


@pytest.mark.slow
def test_what_never_happened_is_a_fault_where_the_route_offers_it() -> None:
    roomy = replace(EAGER, cache_tokens=None, max_step_tokens=64, prefill_buckets=(64,), prefix_caching=False)
    row = soak("llama4_text", select_device("cpu"), 3, config=roomy)
    assert {"never: preempted", "never: prefix hits"} <= set(row.faults)
    assert all(fault.startswith("never: ") for fault in row.faults)


@pytest.mark.slow
def test_blocks_that_stay_taken_are_a_fault() -> None:
    def keep_one(engine: Engine) -> None:
        cache_of(engine).pools[0].take(1)

    assert soak("mamba2", select_device("cpu"), 12, config=EAGER, spoil=keep_one).faults == [
        "at rest, 0 run, 0 wait, and 1 blocks are taken"
    ]


def completion(reason: Any) -> Completion:
    return Completion(prompt_token_ids=(1,), token_ids=(), text="", finish_reason=reason, max_new_tokens=2)


@pytest.mark.parametrize(
    ("tokens", "reason", "aborted", "fault"),
    [
        ([5, 6], "length", None, ""),
        ([5], "abort", 1, ""),
        ([], "abort", 0, ""),
        ([5, 7], "length", None, "token 1 behind a prompt of 1 is 7, not 6"),
        ([7], "abort", 1, "token 0 behind a prompt of 1 is 7, not 5"),
        ([5], "length", None, "1 of 2 tokens, and then length"),
        ([5, 6], "abort", None, "2 of 2 tokens, and then abort"),
        ([5, 6], None, None, "2 of 2 tokens, and then none"),
    ],
)
def test_a_request_is_held_against_the_model_alone(tokens: list[int], reason: Any, aborted: Any, fault: str) -> None:
    job = Job(prompt=[1], own=[5, 6], aborted=aborted, tokens=tokens, completion=reason and completion(reason))
    assert job.fault == fault


def test_requests_that_are_never_done_end_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staggered, "_MAX_STEPS", 5)
    with pytest.raises(RuntimeError, match="5 steps, and requests are not done"):
        soak("mamba2", select_device("cpu"), 5, config=EAGER)


def test_the_table_has_a_column_for_each_event() -> None:
    assert soak_models.HEAD.splitlines()[0].count("|") == 5 + len(EVENTS)
