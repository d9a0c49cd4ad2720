"""What a step costs the host, in counts: nothing runs once per token of a prompt, and little is put on the queue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.engine.steps.staged import StagedSteps
from tests.engine.models.shallow import shallow_model
from tests.recording import acme

LONG = 512
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=LONG,
    decode_buckets=(4,),
    prefill_buckets=(LONG,),
    sampling=("greedy",),
    run_ahead=True,
    options=CompileOptions(mode="full", passes=()),
)
SMALL_INPUTS = 7 * 256
"""Bytes of all inputs of a decode step but the block tables: each of few rows, and at the beginning of 256 bytes."""
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine whose graphs cost nothing: a replay returns what the capture left, so all that is seen is the host's.

    No tokenizer: what a detokenizer does per token is not counted here.
    """
    with Engine.load(shallow_model(), acme(update=False), CONFIG) as engine:
        engine.loaded = replace(engine.loaded, tokenizer=None)
        for entry in engine._runner.program._runner._entries.values():  # type: ignore[attr-defined]
            outputs = tuple(output.clone() for output in entry.run(None))
            entry.run = lambda _, outputs=outputs: outputs
        yield engine


def lines(action: Callable[[], object]) -> int:
    """Return how many lines of Python run in the action, each turn of a loop or comprehension counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event in ("line", "call")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


class Copies(TorchDispatchMode):
    """Notes the bytes of each copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.num_bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def serve(engine: Engine, prompt: list[int], params: SamplingParams) -> None:
    engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()


def leave(engine: Engine) -> None:
    for request_id in tuple(engine._requests):
        engine.abort(request_id)


@pytest.mark.slow
def test_no_line_of_python_runs_once_per_token_of_a_prompt(engine: Engine) -> None:
    def prefill(length: int) -> None:
        engine._runner.cache.forget()  # type: ignore[attr-defined]  # the second prompt begins like the first
        engine.add_request([3 + i for i in range(length)], replace(GREEDY, max_new_tokens=LONG - length))
        engine.step()

    counts = {}
    for length in (50, 450, 50, 450):  # the second time, what is found once per size is found
        counts[length] = lines(partial(prefill, length)) - length  # of the comprehension above
        leave(engine)
    num_blocks = (450 - 50) // 16
    assert abs(counts[450] - counts[50]) < 12 * num_blocks, counts  # blocks are taken and published one by one


def test_a_decode_step_puts_short_copies_on_the_queue(engine: Engine) -> None:
    """A third one, of the tokens, follows where the device still computes them: here they are there."""
    for index in range(3):
        engine.add_request([5, 6, 7 + index], replace(GREEDY, max_new_tokens=40))
    for _ in range(6):
        engine.step()
    with Copies() as copies:
        engine.step()
    leave(engine)
    inputs, feed = copies.num_bytes
    # The block tables are there already, and that a prompt may have hundreds of tokens makes no difference.
    assert inputs <= SMALL_INPUTS and feed == 3 * 8


def test_block_tables_are_sent_again_when_a_sequence_joins(engine: Engine) -> None:
    engine.add_request([5, 6, 7], replace(GREEDY, max_new_tokens=40))
    sizes = []
    for turn in range(12):
        if turn == 6:
            engine.add_request([8, 9], replace(GREEDY, max_new_tokens=40))
        with Copies() as copies:
            engine.step()
        sizes.append(max(copies.num_bytes, default=0))
    leave(engine)
    with_tables = [size > SMALL_INPUTS for size in sizes]
    assert with_tables[3:6] == with_tables[9:] == [False] * 3 and any(with_tables[6:9])


def test_the_next_step_is_queued_before_the_tokens_of_one_are_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    run, read_later = StagedSteps.run, StagedSteps.read_later

    def noted(self: StagedSteps, *arguments: Any, **options: Any) -> Any:
        events.append(f"queue {len([e for e in events if e.startswith('queue')])}")
        return run(self, *arguments, **options)

    def noted_later(self: StagedSteps, output: Any) -> Any:
        number, found = events[-1].split()[1], read_later(self, output)
        assert found.read is not None

        def noted_read() -> list[int]:
            events.append(f"wait {number}")
            return found.read()

        return found._replace(read=noted_read)

    monkeypatch.setattr(StagedSteps, "run", noted)
    monkeypatch.setattr(StagedSteps, "read_later", noted_later)
    serve(engine, [5, 6, 7], replace(GREEDY, max_new_tokens=6))
    # Step 0 is the prompt; whatever the host does with tokens, the device has the next step by then.
    each = [f"{kind} {number}" for number in range(1, 6) for kind in ("queue", "wait")]
    steady = [f"{kind} {int(number) - (kind == 'wait')}" for kind, number in map(str.split, each)]
    assert events == ["queue 0", *steady, "wait 5"]
