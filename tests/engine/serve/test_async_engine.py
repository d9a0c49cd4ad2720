"""An engine in a thread of its own: outputs on the event loop, requests that leave, faults that are said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.http.load import load_of
from core.engine.serve.async_engine import AsyncEngine
from core.engine.serve.engine import Engine
from core.engine.serve.request import RequestOutput
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import Sequence
from core.errors import EngineError, ModelError, UsageError
from tests.engine.models.shallow import shallow_model
from tests.support import refused

CONFIG = EngineConfig(max_num_seqs=3, max_model_len=96, options=CompileOptions(mode="off"))
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
CHAT = [{"role": "user", "content": "What is a list?"}]
TEXTS = ["If the argument is", "This", CHAT]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The embedded model with a chat template."""
    with Engine.load(shallow_model(), "cpu", CONFIG) as engine:
        engine.loaded.require_tokenizer().chat_template = "{{ messages[0].role }}: {{ messages[0].content }}"
        yield engine


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def test_the_outputs_are_those_of_generate(engine: Engine) -> None:
    wanted = engine.generate(TEXTS, PARAMS)
    assert wanted[2].prompt_token_ids == engine.generate(["user: What is a list?"], PARAMS)[0].prompt_token_ids[1:]

    async def run() -> list[list[RequestOutput]]:
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*(collect(served.generate(text, PARAMS)) for text in TEXTS))

    for outputs, completion in zip(asyncio.run(run()), wanted, strict=True):
        assert [token for output in outputs for token in output.token_ids] == list(completion.token_ids)
        assert "".join(output.text for output in outputs) == completion.text
        assert [output.completion for output in outputs] == [None] * 7 + [completion]


@pytest.mark.parametrize("number", [1, 5, 17, 24])
def test_an_error_while_tokens_are_handed_out_loses_none(
    engine: Engine, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, calls, settle = engine.generate(TEXTS, PARAMS), [0], Engine._settle

    def failing(self: Engine, sequence: Sequence, num_tokens: int) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise ValueError("once")
        settle(self, sequence, num_tokens)

    async def run() -> list[list[RequestOutput]]:
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*(collect(served.generate(text, PARAMS)) for text in TEXTS))

    monkeypatch.setattr(Engine, "_settle", failing)
    for outputs, completion in zip(asyncio.run(run()), wanted, strict=True):
        assert [token for output in outputs for token in output.token_ids] == list(completion.token_ids)
        assert outputs[-1].completion is not None and outputs[-1].completion.text == completion.text
    assert calls[0] >= number


def test_leaving_early_ends_the_request_and_nobody_elses(engine: Engine) -> None:
    (wanted,) = engine.generate(["This"], PARAMS)
    before = engine.stats().ended

    async def run() -> str:
        async with AsyncEngine(engine) as served:
            other = asyncio.ensure_future(collect(served.generate("This", PARAMS)))
            long = served.generate("If", SamplingParams(max_new_tokens=80, ignore_eos=True))
            async for _ in long:
                break
            await long.aclose()
            text = "".join(output.text for output in await other)
            while (await served.call(load_of)).used_blocks:
                pass
            return text

    assert asyncio.run(run()) == wanted.text
    assert engine.stats().ended == before + 2 and not engine.has_unfinished


def test_a_prompt_that_can_not_be_served_fails_alone(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            good = asyncio.ensure_future(collect(served.generate("This", PARAMS)))
            with pytest.raises(ModelError, match="it is empty"):
                await collect(served.generate("", PARAMS))
            assert len(await good) == 8

    asyncio.run(run())


def test_closing_ends_what_runs_with_its_completion(engine: Engine) -> None:
    async def run() -> RequestOutput:
        served = AsyncEngine(engine)
        with pytest.raises(UsageError, match="it was not started"):
            await served.call(load_of)
        served.start()
        long = collect(served.generate("If", SamplingParams(max_new_tokens=80, ignore_eos=True)))
        running = asyncio.ensure_future(long)
        while not (await served.call(load_of)).running:
            pass
        await served.close()
        await served.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await collect(served.generate("This", PARAMS))
        with pytest.raises(UsageError, match="started before"):
            served.start()
        return (await running)[-1]

    last = asyncio.run(run())
    assert last.completion is not None and last.completion.finish_reason == "abort"


def test_a_function_runs_between_steps_and_its_errors_come_back(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            assert await served.call(lambda engine: engine.route) == "paged"
            with pytest.raises(UsageError, match="params="):
                await served.call(lambda engine: engine.add_request("This", "params"))  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("template", "phrase"),
    [(None, "no chat template"), ("{{ raise_exception('users only') }}", "its template refuses it: users only")],
)
def test_a_chat_that_can_not_be_written_is_refused(engine: Engine, template: str | None, phrase: str) -> None:
    tokenizer = engine.loaded.require_tokenizer()
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        with pytest.raises(ModelError, match=phrase):
            engine.generate([CHAT], PARAMS)
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, StopIteration])
def test_a_function_may_raise_what_no_handler_takes(engine: Engine, kind: type[BaseException]) -> None:
    def raises(_: Engine) -> None:
        raise kind

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            call = asyncio.ensure_future(served.call(raises))
            await asyncio.wait([call], timeout=20)
            found = asyncio.CancelledError() if call.cancelled() else call.exception()
            assert isinstance(found, RuntimeError if kind is StopIteration else kind)
            assert await collect(served.generate("This", PARAMS))

    with suppress(SystemExit):  # asyncio ends a loop by it, too
        asyncio.run(run())


@pytest.mark.parametrize("touch", ["step", "abort"])
def test_a_request_that_a_function_has_touched_ends_with_an_error(engine: Engine, touch: str) -> None:
    def touched(engine: Engine) -> None:
        engine.step() if touch == "step" else engine.abort(next(iter(engine._requests)))

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            outputs = served.generate("This", PARAMS)
            await anext(outputs)
            await served.call(touched)
            with refused(EngineError, "a function given to `call` has stepped or ended it"):
                await asyncio.wait_for(collect(outputs), 20)
            assert not await served.call(lambda engine: engine.has_unfinished)

    asyncio.run(run())


def test_a_request_that_a_function_adds_is_refused(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            with refused(UsageError, "the function has added 1 requests, whose outputs nobody would get"):
                await served.call(lambda engine: engine.add_request("This"))
            assert len(await collect(served.generate("This", PARAMS))) == 8

    asyncio.run(run())


def test_a_receiver_that_raises_takes_no_outputs_from_the_others(engine: Engine) -> None:
    wanted = list(engine.generate(["This"], PARAMS)[0].token_ids)
    got: list[int] = []
    failures: list[object] = []

    def fails(_: object) -> None:
        raise ValueError("of a receiver")

    async def run() -> None:
        ended = asyncio.Event()

        def receive(output: RequestOutput | Exception) -> None:
            assert isinstance(output, RequestOutput)
            got.extend(output.token_ids)
            if output.completion is not None:
                ended.set()

        asyncio.get_running_loop().set_exception_handler(lambda _, about: failures.append(about["exception"]))
        async with AsyncEngine(engine) as served:
            served.submit("This", PARAMS, fails)
            served.submit("This", PARAMS, receive)
            await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(run())
    assert got == wanted and failures and all(isinstance(each, ValueError) for each in failures)
