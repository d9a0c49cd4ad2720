"""Sleep and wake, and weights loaded anew: graphs stay, addresses stay, and answers are those of a fresh engine."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core.compilation.options import CompileOptions
from core.device import Device
from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.async_engine import AsyncEngine
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import EngineError, UsageError
from tests.marks import slow_except
from tests.recording import acme
from tests.support import cpu, refused

CPU = torch.device("cpu")
CONFIG = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    decode_buckets=(2,),
    prefill_buckets=(16,),
    sampling=("greedy",),
    sleep_mode=True,
    options=CompileOptions(lowering="inline", enable_passes=("merge_linears",)),
)
EAGER = replace(CONFIG, options=CompileOptions(mode="off"))
GREEDY = SamplingParams(max_new_tokens=4, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [8, 9, 10]]
DEVICES: dict[str, Callable[[], Device]] = {"cpu": cpu, "acme": acme}
ROUTES = {"paged": "llama", "static": "codegen"}
Tokens = list[tuple[int, ...]]


def model(family: str = "llama", seed: int = 0) -> LoadedModel:
    return build_model(tiny_config(family), torch_device=CPU, seed=seed)


def tokens(engine: Engine) -> Tokens:
    return [each.token_ids for each in engine.generate(PROMPTS, GREEDY)]


def fresh(loaded: LoadedModel, device: Device, config: EngineConfig = CONFIG) -> Tokens:
    with Engine(loaded, device, replace(config, sleep_mode=False)) as engine:
        return tokens(engine)


def cache_of(engine: Engine) -> tuple[Tensor, ...]:
    runner: Any = engine._runner
    return runner._paged.tensors if engine.route == "paged" else runner._on_cache.tensors  # type: ignore[no-any-return]


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@dataclass(frozen=True)
class Served:
    """An engine with its model's own weights, and other weights with what a fresh engine answers by them."""

    engine: Engine
    weights: dict[str, Tensor]
    answers: Tokens
    other: dict[str, Tensor]
    other_answers: Tokens


SERVED = slow_except(["acme-paged", "cpu-static", "cpu-paged", "acme-static"], "acme-paged")


@pytest.fixture(scope="module", params=SERVED)
def made(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, _, route = request.param.partition("-")
    family, device = ROUTES[route], DEVICES[name]()
    other = model(family, seed=1)
    other_answers = fresh(other, device)
    with Engine(model(family), device, CONFIG) as engine:
        assert engine.route == route
        weights = {name: tensor.clone() for name, tensor in engine.loaded.model.state_dict().items()}
        yield Served(engine, weights, tokens(engine), other.model.state_dict(), other_answers)


@pytest.fixture
def served(made: Served) -> Served:
    """The same, as it began."""
    if made.engine.is_asleep:
        made.engine.wake()
    made.engine.load_weights(made.weights)
    return made


def test_it_wakes_with_the_same_numbers_and_graphs(served: Served) -> None:
    engine = served.engine
    places, report = memory_of((*engine.loaded.model.parameters(), *cache_of(engine))), engine.report()
    for _ in range(2):
        assert engine.sleep() > 0
        assert engine.is_asleep
        engine.wake()
        assert tokens(engine) == served.answers
    after = engine.report()
    assert memory_of((*engine.loaded.model.parameters(), *cache_of(engine))) == places
    assert after.counters == report.counters and after.fallbacks == report.fallbacks
    assert sum(after.replays.values()) > sum(report.replays.values())


def test_new_weights_give_the_tokens_of_a_fresh_engine(served: Served) -> None:
    assert tokens(served.engine) == served.answers != served.other_answers  # the cache holds prefixes by these weights
    served.engine.load_weights(iter(served.other.items()))
    assert tokens(served.engine) == served.other_answers


def test_weights_that_were_given_up_have_to_be_loaded(served: Served) -> None:
    engine = served.engine
    engine.sleep(level=2)
    engine.wake()
    with refused(UsageError, "sleep(level=2) gave its weights up", "load_weights"):
        engine.generate(PROMPTS, GREEDY)
    with refused(UsageError, "load all of them"):
        engine.load_weights(served.other, partial=True)
    with refused(UsageError, "missing"):
        engine.load_weights({})
    engine.load_weights(served.other)
    assert tokens(engine) == served.other_answers


def test_all_weights_and_all_of_the_cache_sleep(served: Served) -> None:
    engine = served.engine
    sleeper: Any = engine._sleeper
    assert memory_of(sleeper._weights.tensors) == memory_of(engine.loaded.model.parameters())
    assert memory_of(sleeper._cache.tensors) == memory_of(cache_of(engine))


@pytest.mark.slow
def test_recurrent_states_sleep_too() -> None:
    with Engine(model("lfm2"), acme(), EAGER) as engine:  # convolutions beside attention
        before = tokens(engine)
        engine.sleep()
        engine.wake()
        assert tokens(engine) == before


@pytest.mark.slow
def test_the_memory_of_the_process_falls_and_comes_back() -> None:
    config = replace(EAGER, cache_tokens=2**16)
    loaded = build_model(tiny_config("llama", vocab_size=60_000, hidden_size=256), torch_device=CPU)
    used = cpu().parts.memory
    with Engine(loaded, cpu(), config) as engine:
        before, awake = tokens(engine), used().used_bytes
        weights = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
        given = [engine.sleep(level=2), awake + sum(t.nbytes for t in weights.values()) - used().used_bytes]
        assert given[0] > 100 * 2**20
        assert given[1] > 0.9 * given[0]
        engine.wake()
        engine.load_weights(weights)
        assert tokens(engine) == before
        assert used().used_bytes > awake


def test_the_account_of_the_card_falls_and_comes_back() -> None:
    device = acme()

    def used() -> int:
        return device.parts.memory().used_bytes

    before = used()
    with Engine(model(), device, EAGER) as engine:
        awake = used()
        freed = engine.sleep(level=1)
        weights = sum(
            {
                p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.loaded.model.parameters()
            }.values()
        )
        assert freed > weights and awake - used() == freed
        engine.wake()
        assert used() == awake
    del engine
    gc.collect()
    assert used() == before


def test_what_is_asked_at_the_wrong_time_is_refused() -> None:
    with Engine(model(), cpu(), EAGER) as engine:
        engine.add_request(PROMPTS[0], GREEDY)
        for wrong in (engine.sleep, lambda: engine.load_weights({})):
            with refused(UsageError, "1 requests are unfinished", "abort"):
                wrong()
        while engine.has_unfinished:
            engine.step()
        with refused(UsageError, "sleep(level=3)", "choose 1 or 2"):
            engine.sleep(3)
        with refused(UsageError, "the engine is awake"):
            engine.wake()
        engine.sleep()
        for wrong in (engine.sleep, engine.step, lambda: engine.load_weights({}), lambda: engine.add_request([1])):
            with refused(UsageError, "the engine is asleep", "wake()"):
                wrong()
        engine.wake()
    for wrong in (engine.sleep, engine.wake, lambda: engine.load_weights({})):
        with refused(UsageError, "the engine is closed"):
            wrong()


def test_a_step_under_way_for_an_aborted_request_is_forgotten(served: Served) -> None:
    engine = served.engine
    engine.runs_ahead = True
    request = engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    engine.step()
    engine.abort(request)
    engine.sleep()
    engine.wake()
    assert tokens(engine) == served.answers


def test_sleep_has_to_be_asked_for_and_the_device_must_have_such_memory() -> None:
    with Engine(model(), cpu(), replace(EAGER, sleep_mode=False)) as engine, refused(UsageError, "sleep_mode=True"):
        engine.sleep()
    device = cpu()
    without = replace(device, parts=replace(device.parts, sleeping_memory=None))
    with refused(UsageError, "can sleep on cpu", "DeviceParts.sleeping_memory", "leave sleep_mode out"):
        Engine(model(), without, EAGER)


def test_a_device_without_room_leaves_the_engine_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    from core_acme import memory

    with Engine(model(), acme(), EAGER) as engine:
        before = tokens(engine)
        engine.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(memory, "TOTAL_BYTES", memory.CARD.read().used_bytes + 2**16)
            with refused(EngineError, "no room", "still asleep"):
                engine.wake()
        assert engine.is_asleep
        engine.wake()
        assert tokens(engine) == before


@pytest.mark.slow
def test_an_engine_closed_asleep_leaves_a_model_that_nobody_can_use() -> None:
    loaded = model()
    with Engine(loaded, acme(), EAGER) as engine:
        engine.sleep()
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}
    again = model()
    with Engine(again, acme(), EAGER) as engine:
        before = tokens(engine)
    assert fresh(again, acme(), EAGER) == before  # closed awake, it can be served again


def test_weights_that_stop_coming_are_not_served(served: Served) -> None:
    state = list(served.other.items())
    with pytest.raises(ZeroDivisionError):
        served.engine.load_weights(pair if n < 3 else (1 // 0) for n, pair in enumerate(state))  # type: ignore[misc]
    with refused(UsageError, "loading stopped after 3", "all of the weights"):
        served.engine.generate(PROMPTS, GREEDY)
    served.engine.load_weights(state)
    assert tokens(served.engine) == served.other_answers


@pytest.mark.slow
def test_an_async_engine_sleeps_between_requests() -> None:
    other = model(seed=1)

    async def main(engine: Engine) -> list[int]:
        async with AsyncEngine(engine) as served:
            assert await served.sleep(2) > 0
            with pytest.raises(UsageError, match="asleep"):
                [output async for output in served.generate(PROMPTS[0], GREEDY)]
            await served.wake()
            await served.load_weights(iter(other.model.state_dict().items()))
            return [token async for output in served.generate(PROMPTS[0], GREEDY) for token in output.token_ids]

    with Engine(model(), cpu(), EAGER) as engine:
        found = asyncio.run(main(engine))
    assert tuple(found) == fresh(other, cpu(), EAGER)[0]


@pytest.mark.slow
def test_quantised_weights_load_by_their_names() -> None:
    def quantised(seed: int) -> LoadedModel:
        loaded = model(seed=seed)
        core.quantize(loaded.model, "int8")
        return loaded

    other = quantised(1)
    expected = fresh(other, cpu(), EAGER)
    with Engine(quantised(0), cpu(), CONFIG) as engine:
        assert tokens(engine) != expected
        engine.load_weights(other.model.state_dict())
        assert tokens(engine) == expected
