"""core/compilation/capture/stitch.py: the generated Python, whatever the names and arguments of its eager calls."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.capture.stitch import EagerStep, GraphStep, Step, stitch
from core.errors import CaptureError
from tests.support import refused

KEY = GraphKey("main", (4,))


def graph(part: int) -> GraphStep:
    return GraphStep(KEY._replace(part=part))


def eager(
    name: str, fn: Callable[..., Any], *args: Any, targets: tuple[Tensor | None, ...] = (), **kwargs: Any
) -> EagerStep:
    return EagerStep(name, fn, args, kwargs, targets)


def run(*steps: Step) -> tuple[list[Any], str]:
    """Run the stitched steps; return the parts that were replayed, in order, and the source."""
    replayed: list[Any] = []
    replay, source = stitch("replay", steps, lambda key: replayed.append(key.part))
    ast.parse(source)
    replay()
    return replayed, source


def test_steps_run_in_order() -> None:
    order: list[Any] = []
    steps = [graph(0), eager("f", lambda x: order.append(x), 7), graph(1)]
    replay, source = stitch("replay", steps, lambda key: order.append(key))
    replay()
    replay()
    assert order == [KEY._replace(part=0), 7, KEY._replace(part=1)] * 2
    assert source.splitlines()[0] == "def replay():" and len(source.splitlines()) == 4


def test_no_steps_are_a_function_too() -> None:
    assert run()[0] == []


@pytest.mark.parametrize(
    "name",
    ["0", "1.2.mlp", "acme::mix", "<lambda>", "a.<locals>.b", "a²", "класс", "class", "land", "graph", "", "a b"],
)
def test_any_name_becomes_a_call(name: str) -> None:
    target = torch.zeros(2)
    replayed, _ = run(graph(0), eager(name, lambda x: x + 1, torch.ones(2), targets=(target,)), graph(1))
    assert replayed == [0, 1] and target.tolist() == [2, 2]


def test_one_name_many_times_binds_each_call_for_itself() -> None:
    targets = [torch.zeros(1) for _ in range(12)]
    steps: list[Step] = []
    for number, target in enumerate(targets):
        steps += [
            graph(number),
            eager("acme::mix", lambda x: x * 2, torch.full((1,), float(number)), targets=(target,)),
        ]
    replayed, _ = run(*steps)
    assert replayed == list(range(12)) and [float(t) for t in targets] == [2.0 * n for n in range(12)]


def test_names_that_differ_in_dots_only_do_not_meet() -> None:
    first, second = torch.zeros(1), torch.zeros(1)
    run(
        eager("a.b", lambda: torch.ones(1), targets=(first,)),
        eager("a_b", lambda: torch.full((1,), 2.0), targets=(second,)),
    )
    assert (float(first), float(second)) == (1, 2)


@pytest.mark.parametrize("names", [("out", "a0", "k0"), ("class", "lambda"), ("a.b", "1", "y"), ("land",)])
def test_keywords_of_any_name_reach_the_function(names: tuple[str, ...]) -> None:
    target = torch.zeros(1)
    kwargs = {name: torch.full((1,), 10.0**index) for index, name in enumerate(names)}
    step = EagerStep("f", lambda x, **given: x + sum(given.values()), (torch.full((1,), 0.5),), kwargs, (target,))
    run(graph(0), step, graph(1))
    assert float(target) == 0.5 + sum(10.0**index for index in range(len(names)))


def test_plain_values_are_written_out_and_others_bound() -> None:
    seen: list[Any] = []
    values = (None, True, 3, "it's", 2.5, float("nan"), [1, 2], torch.float16, slice(1, 2))
    _, source = run(eager("f", lambda *given, **more: seen.append((given, more)), *values, flag=False))
    ((given, more),) = seen
    assert given[:5] == values[:5] and given[5] is values[5] and given[6:] == values[6:] and more == {"flag": False}
    assert '(None, True, 3, "it\'s", ' in source and "flag=False" in source


@pytest.mark.parametrize(
    "result",
    [
        lambda: (torch.ones(2), torch.full((3,), 2.0)),
        lambda: {"first": torch.ones(2), "second": [torch.full((3,), 2.0), None]},
        lambda: [torch.nn.Parameter(torch.ones(2)), torch.full((3,), 2.0)],
    ],
)
def test_several_results_land_in_order_of_the_tree(result: Callable[[], Any]) -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    run(eager("f", result, targets=(first, second)))
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2, 2]


def test_results_in_memory_of_arguments_do_not_land() -> None:
    x, y, target = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    _, source = run(
        eager("f", lambda t: t.add_(1), x, targets=(None,)),
        eager("g", lambda t: (t.add_(1), t + 5), y, targets=(None, target)),
    )
    assert x.tolist() == [1, 1] == y.tolist() and target.tolist() == [6, 6]
    assert source.count("land") == 1


@pytest.mark.parametrize("result", [lambda: [torch.ones(2)], lambda: {"x": torch.nn.Parameter(torch.ones(2))}])
def test_a_single_result_may_be_wrapped(result: Callable[[], Any]) -> None:
    target = torch.zeros(2)
    run(eager("f", result, targets=(target,)))
    assert target.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("targets", "result", "phrases"),
    [
        (1, torch.ones(3), ("shape (3,)", "shape (2,)")),
        (1, torch.ones(1), ("shape (1,)", "shape (2,)")),  # copy_ would broadcast it
        (1, torch.ones(2).half(), ("torch.float16", "torch.float32")),
        (1, (torch.ones(2), torch.ones(2)), ("gave 2 tensors, and 1 when",)),
        (1, None, ("gave 0 tensors, and 1 when",)),
        (2, torch.ones(2), ("gave 1 tensors, and 2 when",)),
        (2, (torch.ones(2), torch.ones(4)), ("shape (4,)", "shape (2,)")),
    ],
)
def test_other_results_than_at_capture_are_refused(targets: int, result: Any, phrases: tuple[str, ...]) -> None:
    landed = tuple(torch.zeros(2) for _ in range(targets))
    with refused(CaptureError, "an eager call between two graphs", *phrases):
        run(eager("f", lambda: result, targets=landed))


def test_a_result_of_other_strides_lands_by_value() -> None:
    target = torch.zeros(2, 3)
    run(eager("f", lambda: torch.arange(6.0).view(3, 2).t(), targets=(target,)))
    assert target.tolist() == [[0, 2, 4], [1, 3, 5]]
