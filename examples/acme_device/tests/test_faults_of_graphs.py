"""Each planted fault of capture and replay shows on a backend driven directly, and the honest backend has none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from core.common.graphs.backend import GraphKey
from core.device import PluginInfo
from core.errors import CaptureError
from core.hookspecs import OpenContext
from torch import Tensor

from core_acme import plugin
from core_acme.faults import FAULTS, VARIABLE
from core_acme.memory import CARD

ONE, TWO, THREE = (GraphKey("decode", (size,)) for size in (1, 2, 3))
INFO = PluginInfo(device="acme", distribution="acme-device", version="0.1.0", entry_point="core_acme.plugin")


def backend() -> Any:
    return plugin.core_graph_backend()()


def capture(
    made: Any, fn: Callable[[], tuple[Tensor, ...]], key: GraphKey = ONE, **inputs: Tensor
) -> tuple[Tensor, ...]:
    with made.capture_session():
        outputs: tuple[Tensor, ...] = made.capture_one(key, fn, inputs, lambda: None)
    return outputs


def replay_stale_input() -> bool:
    """Whether a replay goes on with what an input held at capture."""
    made, x, y = backend(), torch.ones(3), torch.ones(3)
    capture(made, lambda: (x * 2 + y,), x=x, y=y)
    y.fill_(5)
    return made.replay(ONE)[0].tolist() == [3, 3, 3]


def replay_weights() -> bool:
    """Whether a weight that was updated in place keeps its old value in replays."""
    made, x, weight = backend(), torch.ones(3), torch.ones(3)
    capture(made, lambda: (x * weight,), x=x)
    weight.fill_(4)
    return made.replay(ONE)[0].tolist() == [1, 1, 1]


def replay_noise() -> bool:
    """Whether two replays of the same inputs differ."""
    made, x = backend(), torch.rand(8)
    capture(made, lambda: (x * 3,), x=x)
    first = made.replay(ONE)[0].clone()
    second = made.replay(ONE)[0]
    assert torch.allclose(first, second)
    return not torch.equal(first, second)


def output_reused() -> bool:
    """Whether the first of two outputs holds what was computed after it."""
    made, x = backend(), torch.arange(4.0)
    capture(made, lambda: (x + 1, x * 10), x=x)
    first, second = made.replay(ONE)
    assert torch.equal(second, x * 10)
    return torch.equal(first, second)


def output_moves() -> bool:
    """Whether outputs have other addresses than at capture."""
    made, x = backend(), torch.ones(3)
    captured = capture(made, lambda: (x + 1,), x=x)
    outputs = made.replay(ONE)
    assert outputs[0].tolist() == [2, 2, 2]
    return outputs[0].data_ptr() != captured[0].data_ptr()


def wrong_bucket() -> bool:
    """Whether a key replays the graph of another one."""
    made, x = backend(), torch.ones(2)
    for scale, key in ((2, ONE), (3, TWO)):
        capture(made, lambda scale=scale: (x * scale,), key, x=x)  # type: ignore[misc]  # a lambda's default
    return made.replay(TWO)[0].tolist() == [2, 2]


def memory_kept() -> bool:
    """Whether memory is in use after the last cleanup."""
    before, made, x = CARD.read().used_bytes, backend(), torch.ones(100)
    capture(made, lambda: (x + 1,), x=x)
    made.cleanup()
    return CARD.read().used_bytes > before


def eager_replay() -> bool:
    """Whether a replay calls Python."""
    made, x, calls = backend(), torch.ones(2), []

    def fn() -> tuple[Tensor, ...]:
        calls.append(1)
        return (x + 1,)

    capture(made, fn, x=x)
    num_calls = len(calls)
    assert made.replay(ONE)[0].tolist() == [2, 2]
    return len(calls) > num_calls


def writes_twice() -> bool:
    """Whether a replay adds twice what it has to add once."""
    made, x, cache = backend(), torch.ones(2), torch.zeros(2)
    capture(made, lambda: (cache.add_(x) * 1,), x=x)
    cache.zero_()  # the warm-up's
    made.replay(ONE)
    return cache.tolist() == [2, 2]


def capture_writes() -> bool:
    """Whether recording leaves what it wrote; the warm-up writes too, once."""
    made, x, cache = backend(), torch.ones(2), torch.zeros(2)
    capture(made, lambda: (cache.add_(x) * 1,), x=x)
    return cache.tolist() == [2, 2]


def recapture_ignored() -> bool:
    """Whether a key captured again replays what it was first captured from."""
    made, x = backend(), torch.ones(2)
    capture(made, lambda: (x * 2,), x=x)
    capture(made, lambda: (x * 3,), x=x)
    return made.replay(ONE)[0].tolist() == [2, 2]


def failed_capture_sticks() -> bool:
    """Whether a good capture is refused after a bad one, by another backend too."""
    made, x = backend(), torch.ones(2)
    with pytest.raises(CaptureError, match=r"\.item"):
        capture(made, lambda: (x * x.sum().item(),), x=x)
    try:
        capture(backend(), lambda: (x * 2,), x=x)
    except CaptureError:
        return True
    finally:
        made.cleanup()
    capture(backend(), lambda: (x * 2,), x=x)
    return False


def _sums(made: Any, *lengths: list[int]) -> list[list[float]]:
    x = torch.ones(2, 4)
    capture(made, lambda: (torch.ops.acme.window_sum(x, [4, 4]),), x=x)
    found = []
    for each in lengths:
        made.update(ONE, {"lengths": each})
        found.append(made.replay(ONE)[0].tolist())
    return found


def update_ignored() -> bool:
    """Whether replays keep the captured lengths."""
    return _sums(backend(), [1, 2], [3, 0]) == [[4, 4], [4, 4]]


def update_late() -> bool:
    """Whether a replay takes the lengths of the one before."""
    return _sums(backend(), [1, 2], [3, 0], [2, 2]) == [[1, 2], [1, 2], [3, 0]]


def uncaptured_replayed() -> bool:
    """Whether a key that nobody captured can be run."""
    made, x = backend(), torch.ones(2)
    capture(made, lambda: (x * 2,), THREE, x=x)
    if not made.can_run(TWO):
        return False
    return made.replay(TWO)[0].tolist() == [2, 2] and not made.can_run(GraphKey("prefill", (3,)))


def thread_mixed() -> bool:
    """Whether two threads that replay graphs of their own get results of each other."""
    start, wrong = threading.Barrier(2), []

    def work(value: float) -> None:
        made, x = backend(), torch.full((64,), value)
        capture(made, lambda: (x * 2,), x=x)
        start.wait(timeout=30)
        wrong.extend(value for _ in range(40) if made.replay(ONE)[0][0] != 2 * value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return bool(wrong)


def rng_advances() -> bool:
    """Whether a capture without random numbers moves those of the process."""
    made, x, before = backend(), torch.ones(2), torch.get_rng_state()
    capture(made, lambda: (x * 2,), x=x)
    return not torch.equal(torch.get_rng_state(), before)


def late_landing() -> bool:
    """Whether a result waits for a synchronisation or for the next replay; nothing asks the honest device for one."""
    synchronize = plugin.core_open_device(OpenContext(plugin=INFO)).synchronize
    made, x = backend(), torch.ones(2)
    (out,) = capture(made, lambda: (x * 2,), x=x)
    made.replay(ONE)
    late = out.isnan().all()
    synchronize()
    assert out.tolist() == [2, 2]
    x.fill_(3)
    made.replay(ONE)
    assert out.tolist() == ([2, 2] if late else [6, 6])
    x.fill_(4)
    made.replay(ONE)
    assert out.tolist() == ([6, 6] if late else [8, 8])
    synchronize()
    return bool(late)


def choices(largest: int) -> tuple[list[int], list[int]]:
    """Return the two places that replays choose of 64, once the largest is here and once at the other end."""
    made, scores = backend(), torch.arange(64.0).roll(1 + largest)
    capture(made, lambda: (scores.topk(2).indices, scores[:8].topk(2).indices), scores=scores)
    found = []
    for _ in range(2):
        chosen, few = made.replay(ONE)
        assert few.tolist() == scores[:8].topk(2).indices.tolist()
        found.append(chosen.tolist())
        scores.copy_(scores.flip(0))
    return found[0], found[1]


def choice_stale() -> bool:
    """Whether a replay chooses by the scores of the one before."""
    first, second = choices(40)
    assert first == [40, 39]
    return second == first


def choice_off_by_one() -> bool:
    """Whether the largest is left out."""
    return choices(40) == ([39, 38], [24, 25])


CHECKS: Mapping[str, Callable[[], bool]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        replay_stale_input,
        replay_weights,
        replay_noise,
        output_reused,
        output_moves,
        wrong_bucket,
        memory_kept,
        eager_replay,
        writes_twice,
        capture_writes,
        recapture_ignored,
        failed_capture_sticks,
        update_ignored,
        update_late,
        uncaptured_replayed,
        thread_mixed,
        rng_advances,
        late_landing,
        choice_stale,
        choice_off_by_one,
    )
}


@pytest.fixture(autouse=True)
def _no_fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    from core_acme.faults import graphs

    graphs._KEPT.clear()  # other tests read the account


def planted_in(module: str) -> list[str]:
    return sorted(name for name, fault in FAULTS.items() if fault.hooks.get("core_graph_backend") == module)


def test_every_fault_of_the_backend_is_tried() -> None:
    assert sorted(CHECKS) == sorted(planted_in("graphs") + planted_in("choices"))
    assert len(planted_in("processes")) == 9, "which show between processes alone: the conformance suite starts these"


@pytest.mark.parametrize("name", CHECKS)
def test_a_fault_shows_with_its_name_and_not_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKS[name]() is False
    monkeypatch.setenv(VARIABLE, name)
    assert CHECKS[name]() is True


@pytest.mark.parametrize("name", [*CHECKS, *planted_in("processes")])
def test_a_faulty_backend_is_right_in_all_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay of a single graph, after a synchronisation: what a check that looks no further would see."""
    monkeypatch.setenv(VARIABLE, name)
    made, x = backend(), torch.ones(3)
    capture(made, lambda: (x * 2,), x=x)
    outputs = made.replay(ONE)
    plugin.core_open_device(OpenContext(plugin=INFO)).synchronize()
    assert outputs[0].tolist() == [2, 2, 2]
