"""core/compilation/capture/segments.py: capture in parts on the simulated device, and what a break point may do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_acme.runner import RecordingBackend
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.capture.breaks import eager_break, hold
from core.compilation.capture.segments import CapturedParts, capture_parts
from core.errors import CaptureError
from tests.recording import graph_bytes
from tests.support import refused

KEY = GraphKey("main", (4,))


@contextmanager
def session(backend: RecordingBackend) -> Iterator[None]:
    with torch.no_grad(), backend.capture_session():
        yield


def captured(fn: Callable[[], Any], backend: RecordingBackend | None = None, *, num_warmups: int = 1) -> CapturedParts:
    backend = backend or RecordingBackend()
    with session(backend):
        return capture_parts(
            backend, KEY, fn, num_warmups=num_warmups, after_warmup=lambda: None, device=torch.device("cpu")
        )


def agrees(fn: Callable[[Tensor], Any]) -> CapturedParts:
    """Capture `fn` on a buffer, and compare four replays with calls of `fn` in every bit."""
    x = torch.zeros(4, 2)
    flat = torch.utils._pytree.tree_leaves
    parts = captured(lambda: tuple(flat(fn(x))))
    for seed in range(4):
        x.copy_(torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)))
        parts.run()
        kept = [output.clone() for output in parts.outputs]
        with torch.no_grad():
            expected = flat(fn(x.clone()))
        assert len(kept) == len(expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, expected, strict=True))
    return parts


@eager_break
def host(x: Tensor) -> Tensor:
    """Read a value on the host, which no graph can."""
    return x * 2 if float(x.sum()) > 0 else x * 3


@eager_break
def add_in_place(x: Tensor) -> None:
    x.add_(1)


@eager_break
def view(x: Tensor) -> Tensor:
    return x.view(-1)


@eager_break
def tree(x: Tensor) -> dict[str, Any]:
    return {"sums": (x.sum(0), None), "rows": [x + 1, x[0]]}


@eager_break
def nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:0], x + 1


@eager_break
def transposed(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.preserve_format)


@eager_break
def keywords(x: Tensor, *, out: Tensor, a0: Tensor | None = None) -> Tensor:
    return x + out * 2 + (0 if a0 is None else a0)


@eager_break
def nested(x: Tensor) -> Tensor:
    return host(x + 1) + host(x - 1)


def in_place_on_a_result(x: Tensor) -> Tensor:
    y = host(x * 1)
    y.mul_(3)
    return y + x


def through_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    flat = view(y)
    flat.mul_(5)  # writes y, as the view lies in it
    return y, host(y) + 1


def written_in_a_break(x: Tensor) -> Tensor:
    y = x * 2
    add_in_place(y)
    return y * y


def results_of_a_tree(x: Tensor) -> Tensor:
    found = tree(x * 2)
    return found["rows"][0] + found["sums"][0] + found["rows"][1]


CASES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "no_break": (lambda x: x * 2 + 1, 1),
    "in_the_middle": (lambda x: host(x + 1) * 2, 2),
    "first_and_last": (lambda x: host(x), 2),
    "two_in_a_row": (lambda x: host(host(x)), 3),
    "many": (lambda x: host(host(host(host(x) + 1) + 1) + 1), 5),
    "nested": (lambda x: nested(x * 2) + 1, 2),
    "in_place_on_a_result": (in_place_on_a_result, 2),
    "through_a_view": (through_a_view, 3),
    "written_in_a_break": (written_in_a_break, 2),
    "results_of_a_tree": (results_of_a_tree, 2),
    "empty_result": (lambda x: torch.cat(nothing(x * 2)), 2),
    "strided_result": (lambda x: transposed(x + 1).reshape(-1) * 2, 2),
    "keywords": (lambda x: keywords(x + 1, out=x * 3, a0=x * 5), 2),
    "input_and_result_twice": (lambda x: (lambda y: (y, y, host(y + x)))(host(x)), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_replays_equal_plain_calls(case: str) -> None:
    fn, num_graphs = CASES[case]
    hold([(object(), "gone")])  # by a call that failed before its end
    parts = agrees(fn)
    assert parts.num_graphs == num_graphs == len(parts.eager) + 1


def test_a_break_in_an_autocast_region_replays_in_it() -> None:
    weight = torch.randn(2, 2, generator=torch.Generator().manual_seed(1))

    @eager_break
    def project(x: Tensor) -> Tensor:
        return (x @ weight).float()

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return project(x * 1) + 1

    agrees(fn)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("sets", [False, True])
def test_a_break_replays_with_what_its_call_had_set_and_may_not_set_it(sets: bool) -> None:
    step: Any = SimpleNamespace(rows=None)

    @eager_break
    def scaled(x: Tensor) -> Tensor:
        found: Tensor = x * step.rows
        if sets:
            step.rows = found
        return found

    def fn(x: Tensor) -> Tensor:
        step.rows = x + 1
        hold([(step, "rows")])
        y = scaled(x * 2) + 1
        hold(())
        step.rows = None
        return y

    with refused(CaptureError, "the break point ", "it sets SimpleNamespace.rows") if sets else nullcontext():
        agrees(fn)
        assert step.rows is None


def test_a_break_in_inference_mode_replays_outside_of_it() -> None:
    @torch.inference_mode()
    def fn(x: Tensor) -> Tensor:
        return host(x * 2) * 3

    agrees(fn)


def test_an_eager_function_runs_once_per_replay_and_sees_real_values() -> None:
    seen: list[float] = []

    @eager_break
    def look(x: Tensor) -> Tensor:
        seen.append(float(x.sum()))
        return x + 1

    x = torch.ones(4, 2)
    parts = captured(lambda: (look(x * 2),), num_warmups=2)
    assert seen == [16.0] * 3, "two warm-ups and the capture, whose graph before the break was replayed"
    x.fill_(3)
    parts.run()
    parts.run()
    assert seen[3:] == [48.0] * 2 and parts.outputs[0].tolist() == [[7, 7]] * 4


def test_state_is_written_once_per_replay_inside_and_outside_of_breaks() -> None:
    inside, outside = torch.zeros(1), torch.zeros(1)

    @eager_break
    def count(x: Tensor) -> Tensor:
        inside.add_(1)
        return x + 0

    def fn() -> tuple[Tensor, ...]:
        outside.add_(1)
        y = count(torch.ones(2))
        outside.add_(1)
        return (y,)

    parts = captured(fn)
    inside.zero_(), outside.zero_()
    for _ in range(3):
        parts.run()
    assert (float(inside), float(outside)) == (3, 6)


@pytest.mark.parametrize("value", [3, 2.5, True, "text", object()], ids=["int", "float", "bool", "str", "object"])
def test_results_that_are_no_tensors_are_refused(value: object) -> None:
    given = value

    @eager_break
    def fn(x: Tensor, hint: object = None) -> Any:
        return x + 1, value

    with refused(CaptureError, "the break point ", f"returns a {type(value).__name__}", "around it"):
        captured(lambda: (fn(torch.ones(2))[0],))
    if isinstance(given, (int, float, str)):
        # Equal small numbers are one object: a returned one says nothing about where it comes from.
        with refused(CaptureError, f"returns a {type(value).__name__}"):
            captured(lambda: (fn(torch.ones(2), given)[0],))
    else:  # handed through: the code after it has the same object at every call
        captured(lambda: (fn(torch.ones(2), given)[0],))


def test_another_way_than_in_the_warm_up_is_refused() -> None:
    runs: list[int] = []

    def fn() -> tuple[Tensor, ...]:
        runs.append(1)
        x = torch.ones(2)
        return (host(x) if len(runs) == 1 else x,)

    with refused(
        CaptureError, "capturing main[4] in parts", "it went another way", "CompileOptions(eager=(its path,))"
    ):
        captured(fn)


@pytest.mark.parametrize(
    "late",
    [lambda x: x[:1] + 1, lambda x: (x + 1).half(), lambda x: (x + 1, x + 1), lambda x: x, lambda x: None],
    ids=["shape", "dtype", "structure", "memory", "nothing"],
)
def test_another_result_than_in_the_warm_up_is_refused(late: Callable[[Tensor], Any]) -> None:
    runs: list[int] = []

    @eager_break
    def changing(x: Tensor) -> Any:
        runs.append(1)
        return x + 1 if len(runs) == 1 else late(x)

    def fn() -> tuple[Tensor, ...]:
        changing(torch.ones(2))
        return (torch.ones(2),)

    with refused(CaptureError, "changing", "gave other shapes"):
        captured(fn)


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("place", ["segment", "break"])
def test_a_failure_leaves_the_device_usable_and_its_memory_free(part: int, place: str) -> None:
    backend, level = RecordingBackend(), graph_bytes()
    armed = [False]
    calls = [0]

    @eager_break
    def step(x: Tensor) -> Tensor:
        if armed[0] and place == "break" and calls[0] == part:
            raise RuntimeError("out of paper")
        calls[0] += 1
        return x + 1

    def fn() -> tuple[Tensor, ...]:
        calls[0] = 0
        x = torch.ones(2)
        for number in range(4):
            if armed[0] and place == "segment" and number == part:
                raise RuntimeError("out of paper")
            x = step(x * 2)
        return (x,)

    def arm() -> None:
        armed[0] = True

    with pytest.raises(RuntimeError, match="out of paper"), session(backend):
        capture_parts(backend, KEY, fn, num_warmups=1, after_warmup=arm, device=torch.device("cpu"))
    armed[0] = False
    assert step(torch.ones(1)) == 2, "the thread's break points are plain calls again"
    backend.cleanup()
    assert graph_bytes() == level
    parts = captured(fn, backend)
    parts.run()
    assert parts.outputs[0].tolist() == fn()[0].tolist()
    backend.cleanup()
    del parts
    assert graph_bytes() == level


def test_arguments_that_are_no_plain_memory_reach_the_eager_function() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight, pair = torch.eye(2).to_sparse(), TwoTensor(torch.ones(2), torch.ones(2))

    @eager_break
    def project(x: Tensor, sparse: Tensor, wrapped: Any) -> Tensor:
        return torch.sparse.mm(sparse, x.t()).t() + wrapped.a

    agrees(lambda x: project(x * 2, weight, pair) + 1)


@pytest.mark.parametrize("name", ["sparse", "wrapped"])
def test_results_that_are_no_plain_memory_are_refused(name: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    @eager_break
    def foreign(x: Tensor) -> Tensor:
        return x.to_sparse() if name == "sparse" else TwoTensor(x + 1, x)

    with refused(CaptureError, "foreign", "no memory that a graph can read", "plain tensors"):
        captured(lambda: (foreign(torch.eye(2)), torch.ones(1))[1:])


def test_a_function_that_empties_its_list_gets_a_full_one_at_each_replay() -> None:
    @eager_break
    def take(given: list[Tensor]) -> Tensor:
        return given.pop() + 1

    agrees(lambda x: take([x * 2]) + 1)


def test_writes_into_a_cache_that_a_break_returned_reach_the_cache() -> None:
    cache = torch.zeros(4, 2)

    @eager_break
    def rows() -> Tensor:
        return cache

    def fn(x: Tensor) -> Tensor:
        rows().copy_(x)
        return cache.sum() + x

    x = torch.zeros(4, 2)
    parts = captured(lambda: (fn(x),))
    x.fill_(2)
    parts.run()
    assert cache.tolist() == [[2, 2]] * 4
    assert "land_kept" in parts.source
    moved = cache
    cache = torch.zeros(4, 2)
    with refused(CaptureError, "its result lies at", "return the same memory at each call"):
        parts.run()
    assert moved.tolist() == [[2, 2]] * 4


def test_a_view_of_an_argument_must_stay_the_same_view() -> None:
    count = [4]

    @eager_break
    def first(x: Tensor) -> Tensor:
        return x[: count[0]]

    x = torch.ones(4, 2)
    parts = captured(lambda: (first(x * 2) + 1,))
    parts.run()
    assert parts.outputs[0].tolist() == [[3, 3]] * 4
    count[0] = 2
    with refused(CaptureError, "shape (2, 2)", "shape (4, 2) when it was captured"):
        parts.run()
