"""What is asked of an engine while one of its steps runs is refused, and the step's tokens are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.serve.engine import Engine
from core.engine.serve.stepping import StepLoop
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError
from tests.support import refused

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=64, options=CompileOptions(mode="off"), run_ahead=True)
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
PROMPTS = ["If the argument is", "This"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load(embedded_model(), "cpu", CONFIG) as engine:
        yield engine


@pytest.fixture
def within_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that has another one called once, in the middle of the next step."""
    begin, asked = StepLoop._begin, []

    def first(steps: StepLoop, behind: Any, **named: Any) -> Any:
        if asked:
            asked.pop()()
        return begin(steps, behind, **named)

    monkeypatch.setattr(StepLoop, "_begin", first)
    return asked.append


@pytest.mark.parametrize("use", ["step", "abort", "add", "close"])
def test_another_thread_is_refused_while_a_step_runs(engine: Engine, use: str, within_a_step: Any) -> None:
    wanted = [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]
    first = engine.add_request(PROMPTS[0], PARAMS)
    uses: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "abort": lambda: engine.abort(first),
        "add": lambda: engine.add_request("x"),
        "close": engine.close,
    }
    inside, go = Event(), Event()
    within_a_step(lambda: (inside.set(), go.wait(20)))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.step)
        assert inside.wait(20)
        with refused(UsageError, "a step of this engine is under way", "core.AsyncEngine serves many callers"):
            uses[use]()
        go.set()
        tokens = [token for output in running.result(20) for token in output.token_ids]
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tuple(tokens) == tuple(wanted[0])
    engine.close()


def test_a_signal_handler_is_refused_in_a_step_and_the_engine_goes_on(engine: Engine, within_a_step: Any) -> None:
    wanted = engine.generate(PROMPTS, PARAMS)
    within_a_step(engine.close)  # as a handler calls it: from below the step
    with refused(UsageError, "closing the engine", "below a signal handler"):
        engine.generate(PROMPTS, PARAMS)
    assert engine.generate(PROMPTS, PARAMS) == wanted
