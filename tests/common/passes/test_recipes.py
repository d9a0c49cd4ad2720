"""core/common/passes/values/recipes.py: results made by hand are those of the calls, and no pass adds a guard on a
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from core.common.passes.metadata import NewGuard, fake_values
from core.common.passes.standard import COMMON_PASSES
from core.common.passes.values.layouts import flat, memory
from core.common.passes.values.recipes import call_key, expressions, recipe_of
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewriting import bound_constants
from core.compilation.trace.tracing import trace
from tests.common.passes.linear.merging import Layer


def symbolic(mode: FakeTensorMode) -> FakeTensor:
    """Return a (2, T, 8) fake tensor with a symbolic T."""
    dims = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    return mode.from_tensor(torch.randn(2, 5, 8), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(2, x.shape[1], 2, 4),
    "slice": lambda x: x[:, 1:, 2:],
    "transpose": lambda x: x.transpose(1, 2),
    "own": lambda x: x.transpose(1, 2).neg(),
    "copy": lambda x: x.transpose(1, 2).reshape(-1),
    "split": lambda x: x.split([3, 5], -1),
    "nested": lambda x: (x.neg(), [x.neg(), x[0], 3]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_made_by_hand_is_that_of_the_call(name: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first = symbolic(mode)
    with mode:
        second = first.clone()
        made_first, expected = CALLS[name](first), CALLS[name](second)
    guards = len(mode.shape_env.guards)  # type: ignore[union-attr]
    assert call_key(CALLS[name], (first,), {}, [first]) == call_key(CALLS[name], (second,), {}, [second])
    recipe = recipe_of(made_first, [first])
    assert recipe is not None
    made = recipe.make([second])
    assert type(made) is type(expected)
    for ours, other, theirs in zip(flat(made), flat(made_first), flat(expected), strict=True):
        if not isinstance(theirs, FakeTensor):
            assert ours == theirs
            continue
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device) and ours.fake_mode is mode
        assert expressions(ours.shape) == expressions(theirs.shape)
        assert expressions((*ours.stride(), ours.storage_offset())) == expressions(
            (*theirs.stride(), theirs.storage_offset())
        )
        sizes = [tensor.untyped_storage().nbytes() for tensor in (ours, theirs)]
        assert expressions(sizes[:1]) == expressions(sizes[1:])
        assert (memory(ours) == memory(second)) == (memory(theirs) == memory(second))
        assert memory(ours) != memory(other)
    assert len(mode.shape_env.guards) == guards  # type: ignore[union-attr]


def test_what_can_not_be_made_by_hand_is_run_each_time() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = symbolic(mode)
    with mode:
        assert recipe_of(x.view(torch.int32), [x]) is None  # a view of another dtype
        y = x.neg()
        assert recipe_of((y, y[0]), [x]) is None  # two results in one memory of their own
        assert recipe_of(x.shape[1], [x]) is None


def test_keys_tell_apart_what_calls_do() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = symbolic(mode)
    with mode:
        y, part = x.clone(), x[:, 1:]
    call = torch.add
    keys = [
        call_key(call, args, kwargs, flat((args, tuple(kwargs.values()))))
        for args, kwargs in [
            ((x, x), {}),
            ((x, y), {}),
            ((x, part), {}),
            ((x,), {"other": y}),
            ((x,), {"input": y}),
            (([x, y],), {}),
            ((x, 1), {}),
            ((x, 1.0), {}),
            ((x, True), {}),
            ((x, x.shape[1]), {}),
        ]
    ]
    assert len(set(keys)) == len(keys)


def test_a_fake_run_adds_no_guard_and_says_what_it_asked() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = symbolic(mode)
    with pytest.raises(NewGuard, match="asks about a symbolic size"):
        fake_values(lambda t: t.neg() if t.shape[1] > 3 else t, (x,), {})
    assert mode.shape_env is not None and not mode.shape_env.guards
    assert fake_values(torch.neg, (x,), {})[""].shape[1] == x.shape[1]
    with mode:  # the environment takes guards again
        assert x.shape[1] > 3
    assert len(mode.shape_env.guards) == 1


def test_no_pass_changes_for_which_sizes_a_graph_holds() -> None:
    layers = torch.nn.Sequential(Layer(64, "---"), Layer(64, "bbb")).eval().requires_grad_(False)
    sizes = (2, 3, 7, 8, 64)
    graph = trace(lambda x: layers(x), {"x": torch.randn(2, 8, 64)}, dynamic={"x": (1,)})
    env = graph.shape_env
    assert env is not None

    def state() -> tuple[object, ...]:
        answers = [graph.why_not_for({"x": torch.empty(2, size, 64)}) for size in (1, *sizes)]
        ranges = {str(name): str(bounds) for name, bounds in env.var_to_range.items()}
        return [str(guard.expr) for guard in env.guards], dict(env.replacements), ranges, answers

    before = state()
    reports = PassManager(COMMON_PASSES, strict=True).run(graph.module, constants=bound_constants(graph))
    assert {report.name: report.matched for report in reports}["merge_linears"] == 4
    assert state() == before
