"""core/engine/serve/leading.py: what rank 0 is asked, another rank does; two engines of one process stand for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

import core
from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.parallel.agreement import RanksMissing
from core.engine.serve.engine import Engine
from core.engine.serve.leading import FollowingEngine, LeadingEngine, Orders
from core.engine.steps.runner import EngineConfig
from core.errors import EngineError, UsageError
from tests.support import cpu, refused

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=32, options=core.CompileOptions(mode="off"))
SEEDLESS = SamplingParams(max_new_tokens=6, temperature=1.0, ignore_eos=True)


def llama(seed: int = 0) -> LoadedModel:
    return build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32, seed=seed)


class Pair:
    """A leading engine, and one that follows in a thread."""

    def __init__(self, seed: int = 0) -> None:
        store = distributed.HashStore()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=2))
        self.failures: list[Exception] = []
        self.leader = LeadingEngine(llama(), cpu(), CONFIG, orders=Orders(store), failed=self.failures.append)
        self.follower = FollowingEngine(llama(seed), cpu(), CONFIG)
        self.error: Exception | None = None
        self._orders = Orders(store)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self.follower.follow(self._orders)
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self.leader.close()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.follower.close()


@pytest.mark.slow
def test_the_other_rank_takes_the_same_steps_with_the_same_tokens() -> None:
    pair = Pair()
    # More prompts than sequences at once, so that some wait; drawn without a seed, which rank 0 has to choose.
    leading = pair.leader.generate([[3, 4, 5], [6, 7], [8]], [SEEDLESS] * 3)
    wanted = pair.leader.stats()
    pair.end()
    assert pair.error is None and len(leading) == 3
    assert pair.follower.stats() == wanted and sum(wanted.steps.values()) > 6


def test_a_request_that_is_aborted_is_aborted_there_too() -> None:
    pair = Pair()
    first, second = (pair.leader.add_request([5, 6, number], SEEDLESS) for number in (7, 8))
    pair.leader.step()
    assert pair.leader.abort(first) is not None
    while pair.leader.has_unfinished:
        pair.leader.step()
    pair.end()
    assert pair.error is None and second == 1
    assert pair.follower.stats() == pair.leader.stats()


def test_a_rank_that_makes_other_tokens_says_so() -> None:
    pair = Pair(seed=1)
    greedy = SamplingParams(max_new_tokens=4, ignore_eos=True)
    pair.leader.generate([[3, 4, 5]], greedy)
    pair.end()
    assert isinstance(pair.error, EngineError) and "other tokens than rank 0" in str(pair.error)


def test_a_step_that_failed_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.leader.add_request([1], SEEDLESS)

    def broken(self: Engine) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr(Engine, "step", broken)
    with pytest.raises(RuntimeError, match="lost"):
        pair.leader.step()
    assert [str(each) for each in pair.failures] == ["lost"]
    with refused(EngineError, "a step failed: lost"):
        pair.leader.step()
    pair.leader.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("act", [lambda engine: engine.sleep(), lambda engine: engine.load_weights([])])
def test_weights_stay(act: Callable[[Engine], None]) -> None:
    pair = Pair()
    with refused(UsageError, "several ranks serve"):
        act(pair.leader)
    pair.end()


def test_orders_come_in_order_and_a_busy_rank_does_not_wait_for_ever() -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(milliseconds=200))
    told, heard = Orders(store), Orders(store)
    for number in range(300):
        told.send(number)
        if number >= 1:
            assert heard.receive(busy=True) == number - 1
    assert heard.receive(busy=False) == 299
    with refused(RanksMissing, "rank 0 did not come within 0.2 s"):
        heard.receive(busy=True)
