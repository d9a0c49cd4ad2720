"""What a callback of `generate` may do: each prompt still has its completion, in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError

PROMPTS = [[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42], [50, 51]]
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=64,
    prefill_buckets=(32,),
    decode_buckets=(3,),
    options=CompileOptions(lowering="inline", mode="off", cache=False),
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load(embedded_model(), "cpu", CONFIG) as engine:
        yield engine


def stepping(engine: Engine, index: int) -> None:
    engine.step()


def aborting_first(engine: Engine, index: int) -> None:
    engine.abort(0)


def aborting_all(engine: Engine, index: int) -> None:
    for request_id in range(len(PROMPTS)):
        engine.abort(request_id)


def closing(engine: Engine, index: int) -> None:
    engine.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("act", "aborted"),
    [(stepping, ()), (aborting_first, (0,)), (aborting_all, range(5)), (closing, range(5))],
)
def test_every_prompt_has_its_completion(
    engine: Engine, act: Callable[[Engine, int], None], aborted: range | tuple[int, ...]
) -> None:
    wanted = engine.generate(PROMPTS, PARAMS)
    first = engine._num_requests
    acted: list[int] = []

    def on_text(index: int, text: str) -> None:
        if not acted:
            acted.append(index)
            shifted = Shifted(engine, first)
            act(shifted, index)  # type: ignore[arg-type]

    found = engine.generate(PROMPTS, PARAMS, on_text=on_text)
    assert acted and [list(each.prompt_token_ids) for each in found] == PROMPTS
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
        assert one.finish_reason == ("abort" if index in aborted else "length")
        assert index in aborted or one == other
        assert one.max_new_tokens == 4


class Shifted:
    """The engine, whose requests of this call count from 0."""

    def __init__(self, engine: Engine, first: int) -> None:
        self._engine, self._first = engine, first
        self.step, self.close = engine.step, engine.close

    def abort(self, request_id: int) -> object:
        return self._engine.abort(self._first + request_id)


def test_a_request_that_generate_would_swallow_is_refused(engine: Engine) -> None:
    errors: list[UsageError] = []

    def on_text(index: int, text: str) -> None:
        try:
            engine.add_request([1, 2])
        except UsageError as error:
            errors.append(error)

    assert len(engine.generate(PROMPTS[:1], PARAMS, on_text=on_text)) == 1
    assert errors and "generate is running" in str(errors[0])
    engine.add_request([1, 2])


def test_abort_returns_what_there_is_once(engine: Engine) -> None:
    request = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    completion = engine.abort(request)
    assert completion is not None and completion.finish_reason == "abort" and len(completion.token_ids) == 1
    assert engine.abort(request) is None and not engine.has_unfinished


def test_a_context_that_ends_before_what_was_asked_is_said(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="core.engine"):
        (short, full) = engine.generate(
            [[5] * 60, [5] * 3], [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (9, 2)]
        )
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 2 prompts can get fewer new tokens than max_new_tokens asks: the context holds 64"
    ]
    assert (short.max_new_tokens, len(short.token_ids), short.finish_reason) == (4, 4, "length")
    assert (full.max_new_tokens, len(full.token_ids)) == (2, 2)
