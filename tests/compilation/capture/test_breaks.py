"""core/compilation/capture/breaks.py: where break points come from, and that nothing of them stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.compilation.capture.breaks import blamed_module, breaking, breaks_at, call_break, eager_break, modules_of
from core.errors import UsageError
from tests.support import refused


class Counter:
    """A breaker that notes the names it is called with."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(name)
        return fn(*args, **kwargs)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Model(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def paths(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())


@eager_break
def double(x: Tensor, *, times: int = 2) -> Tensor:
    """Return a multiple."""
    return x * times


def test_a_marked_function_is_itself_elsewhere() -> None:
    assert double.__name__ == "double" and double.__doc__ == "Return a multiple."
    assert double(torch.ones(1), times=3) == 3
    traced = torch.compile(double, backend="eager", fullgraph=True)
    assert traced(torch.ones(1)) == 2


def test_a_breaker_gets_the_break_points_of_its_block_and_thread() -> None:
    counter, other = Counter(), []
    with breaking(counter):
        assert double(torch.ones(1)) == 2
        thread = threading.Thread(target=lambda: other.append(double(torch.ones(1))))
        thread.start()
        thread.join()
        with breaking(None):
            double(torch.ones(1))
    double(torch.ones(1))
    assert counter.names == ["double"] and other[0] == 2


def test_a_block_gives_the_breaker_before_back_after_an_error() -> None:
    outer, inner = Counter(), Counter()
    with breaking(outer):
        with pytest.raises(ValueError, match="inside"), breaking(inner):
            raise ValueError("inside")
        call_break("named", lambda: None, (), {})
    assert (outer.names, inner.names) == (["named"], [])


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("layers.*.mlp",), ("layers.0.mlp", "layers.1.mlp")),
        (("layers.1",), ("layers.1",)),
        (("layers.[0]", "layers.0"), ("layers.0",)),
        ((), ()),
    ],
)
def test_modules_become_break_points_by_path(patterns: tuple[str, ...], expected: tuple[str, ...]) -> None:
    model, counter = Model(), Counter()
    with breaks_at(paths(model), patterns) as chosen, breaking(counter), torch.no_grad():
        result = model(torch.ones(1, 2))
    assert chosen == expected and tuple(counter.names) == expected
    assert torch.equal(result, model(torch.ones(1, 2)))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_pattern_without_a_match_is_refused_and_nothing_stays() -> None:
    model = Model()
    with (
        refused(UsageError, "'layers.*.attn'", "layers.0", "named_modules"),
        breaks_at(paths(model), ("layers.0", "layers.*.attn")),
    ):
        pytest.fail("entered")
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_forwards_come_back_after_an_error_and_own_ones_too() -> None:
    model = Model()
    own = model.layers[0].mlp.forward
    model.layers[0].mlp.forward = own
    with pytest.raises(ValueError, match="inside"), breaks_at(paths(model), ("layers.*.mlp", "layers.*")):
        raise ValueError("inside")
    assert model.layers[0].mlp.__dict__["forward"] is own
    assert [n for n, m in model.named_modules() if "forward" in m.__dict__] == ["layers.0.mlp"]


def test_one_module_under_two_names_comes_back() -> None:
    layer = Layer()
    with breaks_at({"first": layer, "second": layer}, ("first", "second")):
        assert "forward" in layer.__dict__
    assert "forward" not in layer.__dict__


def test_two_captures_of_one_model_that_overlap_leave_it_as_it_was() -> None:
    """Two threads capture one model: each sees its own break points, and the first to end takes none away."""
    model, first, second = Model(1), Counter(), Counter()
    x = torch.ones(1, 2)
    outer, inner = breaks_at(paths(model), ("layers.0",)), breaks_at(paths(model), ("layers.0",))
    outer.__enter__()
    inner.__enter__()
    with breaking(first):
        model(x)
    outer.__exit__(None, None, None)
    with breaking(second):
        model(x)
    inner.__exit__(None, None, None)
    assert "layers.0" in first.names and "layers.0" in second.names
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_modules_are_found_in_what_a_callable_holds() -> None:
    model = Model(1)
    own = set(paths(model))

    class Runner:
        def __init__(self) -> None:
            self.model = model

        def step(self, x: Tensor) -> Tensor:
            return self.model(x)

    assert set(modules_of(model)) == own
    assert set(modules_of(model.forward)) == own
    assert set(modules_of(lambda x: model(x))) == own
    assert set(modules_of(Runner().step)) == own
    assert modules_of(torch.relu) == {}


def test_of_several_models_each_has_its_name_before_its_paths() -> None:
    draft, target = Model(1), Model(1)
    found = modules_of(lambda x: target(draft(x)))
    assert found["draft.layers.0"] is draft.layers[0] and found["target.layers.0.mlp"] is target.layers[0].mlp


def test_a_cell_that_is_not_filled_yet_is_no_module() -> None:
    def call(x: Tensor) -> Tensor:
        return late(x)

    assert modules_of(call) == {}
    late = torch.relu


def test_the_innermost_module_that_raised_is_blamed() -> None:
    model = Model()
    model.layers[1].mlp.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 2))
    assert blamed_module(caught.value, paths(model)) == "layers.1.mlp"
    assert blamed_module(ValueError("never raised"), paths(model)) == ""
