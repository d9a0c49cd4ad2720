"""An engine that is interrupted at any line goes on with the next step: nobody waits for ever, and no token is lost.

An interrupt is Ctrl-C, or an error of what a step runs. It can come between any two lines of the engine's own code.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.serve import engine as engine_module
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from tests.recording import acme

FOLDER = Path(engine_module.__file__).parent
FILES = {str(FOLDER / f"{name}.py") for name in ("handing", "stepping", "scheduler", "waiting", "request", "engine")}
NUM_QUICK, NUM_ALL = 12, 400
PROMPTS = [[10, 11, 12], [20, 21, 22] * 4, [30, 31, 32], [40, 41, 42] * 3, [50, 51]]
PARAMS = [
    SamplingParams(max_new_tokens=5, ignore_eos=True, stop=("zzz",)),
    SamplingParams(max_new_tokens=7, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=1, ignore_eos=True),
    SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1),
    SamplingParams(max_new_tokens=9, ignore_eos=True, priority=-1),
]


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_model_len": 32,
        "block_size": 4,
        "cache_tokens": 48,
        "prefill_buckets": (8, 16),
        "decode_buckets": (3,),
        "options": CompileOptions(lowering="inline", mode="off", cache=False),
    }
    return EngineConfig(**fields | changes)


@pytest.fixture(scope="module", params=["in turn", "ahead", "drafts"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """On a cache that is too small for all, so that sequences give way."""
    made = {
        "in turn": lambda: Engine.load(embedded_model(), "cpu", config(decode_steps=2), dtype=torch.float32),
        "ahead": lambda: Engine.load(embedded_model(), acme(), config(run_ahead=True), dtype=torch.float32),
        "drafts": lambda: Engine.load(embedded_model(), "cpu", config(speculative=2), dtype=torch.float32),
    }[request.param]()
    with made as engine:
        assert engine.route == "paged"
        yield engine


class Interrupt:
    """Raises at the n-th line of the engine's code that is run within it, but for those of `Engine.step` itself, whose
    outputs are the caller's by then."""

    def __init__(self, number: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.number, self._error = number, error
        self.count = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "step":
            return self if frame.f_code.co_name == "step" else None
        if event == "line":
            self.count += 1
            if self.count == self.number:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self._error("here")
        return self

    def around(self, function: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(before)


def served(engine: Engine, interrupt: Interrupt) -> dict[int, Any]:
    """Serve all prompts, and return the tokens, the text and the completion of each, in their order."""
    first = engine._num_requests
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, params)
    found: dict[int, Any] = {index: [[], "", None] for index in range(len(PROMPTS))}
    for _ in range(200):
        try:
            outputs = interrupt.around(engine.step)
        except (KeyboardInterrupt, ValueError):
            continue
        for output in outputs:
            each = found[output.request_id - first]
            each[0] += output.token_ids
            each[1] += output.text
            each[2] = output.completion
        if not engine.has_unfinished:
            return found
    raise AssertionError(f"some sequence waits for ever after an interrupt at {interrupt.where}")


SEEDS = [pytest.param(seed, marks=() if seed < NUM_QUICK else pytest.mark.exhaustive) for seed in range(NUM_ALL)]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> tuple[dict[int, Any], int]:
    """Return what each prompt gets, and how many lines are run for that."""
    nothing = Interrupt(-1)
    return served(engine, nothing), nothing.count


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_after_an_interrupt_each_prompt_gets_its_tokens(
    engine: Engine, expected: tuple[dict[int, Any], int], seed: int
) -> None:
    wanted, num_lines = expected
    rng = random.Random(seed)
    interrupt = Interrupt(rng.randrange(num_lines), rng.choice([KeyboardInterrupt, ValueError]))
    found = served(engine, interrupt)
    for index, (tokens, text, completion) in found.items():
        assert (tokens, text) == tuple(wanted[index][:2]), interrupt.where
        assert completion is not None and list(completion.token_ids) == tokens
        assert completion.finish_reason == wanted[index][2].finish_reason and completion.text == text
    assert engine._scheduler.num_running == engine._scheduler.num_waiting == 0 and not engine._scheduler._known
    pools = engine._runner.cache.pools  # type: ignore[attr-defined]
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools), interrupt.where
