"""core/common/passes/cleanup/relayout.py, values/fresh.py: fake values follow changed strides, as running ops would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from core.common.passes.cleanup.relayout import Relayout
from core.common.passes.sites import Refused
from core.common.passes.values.fresh import fresh, reread
from core.compilation.trace.tracing import trace

X = torch.linspace(-1.0, 1.0, 2 * 3 * 8).view(2, 3, 8)


def moved(function: Callable[[Tensor], Any]) -> tuple[fx.GraphModule, dict[str, Any]]:
    """Let `x.abs()` become a slice of rows twice as wide; return what changes, by node name."""
    module = trace(lambda x: function(x.abs()), {"x": X}).module
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    (node,) = (node for node in order if node.target == "abs")
    like = node.meta["example_value"]
    part = reread(fresh(like, (2, 3, 16), (48, 16, 1)), (2, 3, 8), (48, 16, 1), 8)
    changed = Relayout(order).consequences({node: part})
    return module, {node.name: value for node, value in changed.items()}


def test_views_move_and_what_they_feed_stays() -> None:
    _, changed = moved(lambda y: y.view(2, 3, 2, 4).transpose(1, 2).sin() + 1)
    assert set(changed) == {"abs_1", "view", "transpose"}
    assert changed["transpose"].stride() == (48, 4, 16, 1) and changed["transpose"].storage_offset() == 8
    memory = {value.untyped_storage()._cdata for value in changed.values()}
    assert len(memory) == 1


def test_a_view_that_becomes_a_copy_has_memory_of_its_own() -> None:
    _, changed = moved(lambda y: y.reshape(-1).view(3, 16).neg())
    assert set(changed) == {"abs_1", "reshape", "view"}
    memory = [changed[name].untyped_storage()._cdata for name in ("abs_1", "reshape", "view")]
    assert memory[0] != memory[1] == memory[2]


def test_results_of_the_same_dense_strides_stay() -> None:
    _, changed = moved(lambda y: y.transpose(0, 1).sin().transpose(0, 1).view(6, 8))
    assert set(changed) == {"abs_1", "transpose"}


def test_several_results_move_together() -> None:
    _, changed = moved(lambda y: [part.neg() for part in y.chunk(2, dim=-1)][1])
    assert {value.stride() for value in changed["chunk"]} == {(48, 16, 1)}
    assert len(changed) >= 3 and not any(name.startswith("neg") for name in changed)


def test_what_can_not_be_computed_is_refused_at_its_node() -> None:
    with pytest.raises(Refused, match="view can't compute on a slice") as caught:
        moved(lambda y: y.view(-1).neg())
    assert caught.value.node.name == "view"


def test_equal_calls_are_done_once_and_their_views_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    real = Relayout._run
    monkeypatch.setattr(Relayout, "_run", staticmethod(lambda node, *rest: runs.append(node.name) or real(node, *rest)))  # type: ignore[func-returns-value]
    _, changed = moved(lambda y: y.view(6, 8)[2:4].sin() + y.view(6, 8)[2:4].sin())
    assert len(runs) == 3 and len(changed) == 5
    runs.clear()
    _, changed = moved(lambda y: y.reshape(-1).sin() + y.reshape(-1).sin())
    assert runs == ["reshape", "sin"]
    memory = {name: value.untyped_storage()._cdata for name, value in changed.items()}
    assert set(memory) == {"abs_1", "reshape", "reshape_1"} and len(set(memory.values())) == 3


@pytest.mark.parametrize("shape_env", [None, ShapeEnv()], ids=["static", "symbolic"])
def test_hand_made_fakes_are_what_ops_give(shape_env: ShapeEnv | None) -> None:
    mode = FakeTensorMode(shape_env=shape_env)
    base: Any = mode.from_tensor(torch.randn(4, 6, dtype=torch.bfloat16))
    made, ran = reread(base, (2, 3), (6, 2), 7), base.as_strided((2, 3), (6, 2), 7)
    assert isinstance(made, FakeTensor) and made.fake_mode is mode
    for other in (made, fresh(base, (2, 3), (6, 2))):
        assert (other.dtype, other.device, other.shape, other.stride()) == (
            ran.dtype,
            ran.device,
            ran.shape,
            ran.stride(),
        )
    assert made.storage_offset() == 7 and made.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert fresh(base, (2,), (1,)).untyped_storage()._cdata != base.untyped_storage()._cdata
    rows = fresh(base, (base.shape[0], 2), (2, 1))
    assert rows.shape[0] is base.shape[0] or rows.shape[0] == base.shape[0]
