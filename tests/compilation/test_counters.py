"""Integers in Python that a model counts on: one graph for each way they make it take, and the host counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core.compilation.phases.counted import MAX_WAYS
from core.errors import CaptureError, TraceError
from tests.compilation.python_state import Held, Model, outputs
from tests.recording import acme
from tests.support import cpu, refused

ROWS = {"x": core.InputSpec((2,), torch.float32)}


def compiled(model: Callable[..., Tensor], **options: Any) -> core.Program:
    options = {"inputs": ROWS, "passes": (), "lowering": "inline"} | options
    return core.compile(model, cpu(), **options)


def full_at(limit: int) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward that adds into a sum until a limit, and then forgets half of it at each call."""

    def forward(s: Any, x: Tensor) -> Tensor:
        if s.cache.length < limit:
            s.cache.sum.add_(x)
        else:
            s.cache.sum.mul_(0.5)
        s.cache.length += 1
        return s.cache.sum + max(s.cache.length - limit, 0)

    return forward


def caching(limit: int) -> Model:
    return Model(full_at(limit), cache=Held(length=0, sum=torch.zeros(2)))


def test_each_way_is_a_graph_found_before_the_first_call() -> None:
    expected, model = outputs(caching(3), 7), caching(3)
    with compiled(model, strict=True) as program:
        assert program.report().modes == {"main": "compile"} and program.report().num_traces == 2
        assert model.cache.length == 0
        model.cache.sum.zero_()
        with program.serving():
            assert outputs(program, 7) == expected
        assert model.cache.length == 7 and not program.report().fallbacks and not program.report().compiles


def test_the_numbers_are_the_caller_s_to_set() -> None:
    model = caching(3)
    with compiled(model, strict=True) as program:
        model.cache.sum.zero_()
        first = outputs(program, 5)
        model.cache.length = 0
        model.cache.sum.zero_()
        assert outputs(program, 5) == first


def test_a_way_that_was_not_foreseen_runs_eagerly_and_is_counted() -> None:
    model = caching(3)
    model.cache.length = 5
    for strict in (False, True):
        with compiled(model, strict=strict) as program:
            assert program.report().num_traces == 1
            model.cache.length = 0
            model.cache.sum.zero_()
            if strict:
                with refused(CaptureError, "no trace of the model holds for the numbers"):
                    program(x=torch.ones(2))
                continue
            assert outputs(program) == outputs(caching(3))
            assert sum(program.report().fallbacks.values()) == 3
            model.cache.length = 5


@pytest.mark.slow
def test_a_model_of_many_ways_runs_eagerly() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        for _ in range(s.cache.length):
            x = x + 1
        s.cache.length += 1
        return x * s.weight

    model = Model(forward, cache=Held(length=0))
    with refused(TraceError, f"more than {MAX_WAYS} ways"):
        compiled(model, mode="compile")
    assert model.cache.length == 0
    with compiled(model) as program:
        assert program.report().modes == {"main": "off"} and "ways" in program.report().notes[0]
        assert outputs(program) == [[1.0 + n] * 2 for n in range(5)]


@pytest.mark.slow
def test_an_error_of_a_later_call_names_the_numbers_it_begins_with() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.cache.rows[s.cache.length] = x
        s.cache.length += 1
        return s.cache.rows.sum(0)

    def model() -> Model:
        return Model(forward, cache=Held(length=0, rows=torch.zeros(3, 2)))

    with refused(TraceError, "a later call begins with", "cache.length = 3; there: IndexError"):
        compiled(model(), mode="compile")
    counting = model()
    with compiled(counting) as program:  # eagerly: what the model computes, and its own error
        assert program.report().modes == {"main": "off"} and "cache.length = 3" in program.report().notes[0]
        assert counting.cache.length == 0
        assert outputs(program, 3) == outputs(model(), 3)
        with pytest.raises(IndexError):
            program(x=torch.ones(2))


def test_counters_move_by_sizes_and_by_each_other() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.cache.seen = s.cache.seen + x.shape[0]
        s.cache.double = 2 * s.cache.seen - s.cache.seen // 3
        return x + s.cache.seen * 10 + s.cache.double

    def make() -> Model:
        return Model(forward, cache=Held(seen=0, double=0))

    own, model = make(), make()
    rows = {"x": core.InputSpec(("n", 2), torch.float32)}
    with compiled(model, inputs=rows, buckets=[2, 5], strict=True) as program, torch.no_grad():
        assert vars(model.cache) == {"seen": 0, "double": 0}
        for count in (2, 5, 5, 2):
            x = torch.ones(count, 2)
            assert torch.equal(program(x=x), own(x))
            assert vars(model.cache) == vars(own.cache)


def test_a_number_that_only_decides_is_counted_too() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.cache.n += 1
        return x * 10 if s.cache.n == 1 else x

    model = Model(forward, cache=Held(n=0))
    with compiled(model, strict=True) as program:
        assert outputs(program) == [[10.0, 10.0], *[[1.0, 1.0]] * 4]


@pytest.mark.parametrize("options", [{"mode": "full"}, {"mode": "piecewise"}, {"mode": "segmented"}])
def test_a_device_s_graph_would_keep_the_first_numbers(options: Any) -> None:
    model = caching(3)
    with pytest.raises((TraceError, CaptureError)) as caught:
        core.compile(model, acme(), inputs=ROWS, **options)
    assert "cache.length" in str(caught.value) and model.cache.length == 0
    with core.compile(model, acme(), inputs=ROWS) as program:
        assert program.report().modes == {"main": "off"} and "cache.length" in program.report().notes[-1]


@pytest.mark.slow
def test_such_graphs_are_not_kept_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORE_CACHE", "1")
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        with compiled(caching(3), strict=True, options=core.CompileOptions(cache=True)) as program:
            cache = program.report().cache
            assert program.report().num_traces == 2
            assert cache.state == "refused" and "counts on length of a Held" in cache.reason
