"""core/common/ops/layout.py: references give what fakes say, on devices whose ops lay results out otherwise too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.numerics import Fp64Mode
from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY
from core.compilation.implementations import choose_implementations
from tests.common.ops.canonical_oracle import Call, every_sample, faked, outputs, run

_NUMBERS = itertools.count()
_FACTORIES = ("aten::empty", "aten::new_empty")


class ContiguousResults(TorchDispatchMode):
    """A device whose ops give contiguous results whatever the order of their inputs; views are views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(_FACTORIES) or any(value.alias_info for value in func._schema.returns):
            return result
        return pytree.tree_map_only(Tensor, lambda made: made.contiguous(), result)


def declared(reference: Callable[..., Any], fake: Callable[..., Any], schema: str = "(Tensor x) -> Tensor") -> Any:
    name = f"test_layout_{next(_NUMBERS)}"
    return declare(CanonicalOp(schema=name + schema, reference=reference, fake=fake, calls=lambda draw: {}))


def transposed(*shape: int) -> Tensor:
    return torch.randn(*shape).transpose(-1, -2)


def strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in tensors if t.numel()]


def permuted(call: Mapping[str, Any], writes: Sequence[str], *, in_turn: bool) -> Iterator[Call]:
    """Yield a call with each of its tensors in turn in another memory order, or with all of them."""
    forms = {
        name: value.transpose(-1, -2).contiguous().transpose(-1, -2)
        for name, value in call.items()
        if isinstance(value, Tensor) and value.dim() > 1 and name not in writes
    }
    if in_turn:
        yield from ({**call, name: form} for name, form in forms.items())
    else:
        yield {**call, **forms}


@pytest.mark.cases(2)
@pytest.mark.parametrize("op", [op for op in OPS if not op.is_collective], ids=lambda op: op.name)
@pytest.mark.parametrize("in_turn", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all", "in turn"])
def test_references_keep_to_the_fake_where_the_device_does_not(op: CanonicalOp, in_turn: bool) -> None:
    for one in every_sample(op):
        for call in (dict(one.kwargs), *permuted(one.kwargs, op.mutates, in_turn=in_turn)):
            mode, fakes = faked(call)
            with mode:
                wanted = run(op, fakes)
            with ContiguousResults():
                results = outputs(op.reference(**call))
            assert strides(results) == strides(wanted), one.name


def test_the_simulated_device_differs_from_torch() -> None:
    x = transposed(3, 4)
    with ContiguousResults():
        assert (x + 1).is_contiguous() and x.t().t().stride() == x.stride()
    assert not (x + 1).is_contiguous()


def test_kernel_and_reference_are_laid_out() -> None:
    op = declared(lambda x: (x + 1).contiguous(), torch.empty_like)
    x = transposed(5, 3, 4)
    for function in (op.overload, op.reference):
        assert function(x).stride() == x.stride()
        assert torch.equal(function(x), x + 1)


def test_several_results_are_laid_out_each() -> None:
    def both(x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        return (x * scale).contiguous(), x.sum(-1, keepdim=True)

    def fake(x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))

    op = declared(both, fake, "(Tensor x, *, float scale) -> (Tensor, Tensor)")
    x = transposed(3, 4)
    for function in (op.overload, op.reference):
        first, second = function(x, scale=2.0)
        assert first.stride() == x.stride() and torch.equal(first, x * 2) and torch.equal(second, x.sum(-1, True))


def test_results_that_lie_right_are_handed_on_as_they_are() -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return kept[-1]

    op = declared(keep, torch.empty_like)
    for x in (torch.randn(3, 4), transposed(3, 4), torch.randn(3, 1).t(), torch.randn(3, 9)[:, 2:5]):
        assert op.reference(x) is kept[-1]


def test_strides_that_nothing_reads_are_no_reason_to_copy() -> None:
    def reference(x: Tensor) -> Tensor:
        kept.append(x.new_ones(x.shape))
        return kept[-1]

    kept: list[Tensor] = []
    op = declared(reference, lambda x: torch.empty_strided(x.shape, (7,) * x.dim(), device=x.device))
    for x in (torch.randn(2, 2)[:, :1][:1], torch.empty(3, 8)[:0, :4]):
        assert op.reference(x.transpose(0, 1)) is kept[-1]


def test_the_fake_is_not_asked_about_contiguous_arguments_and_once_about_others() -> None:
    asked: list[tuple[int, ...]] = []

    def fake(x: Tensor) -> Tensor:
        asked.append(x.stride())
        return torch.empty_like(x)

    op = declared(lambda x: x + 1, fake)
    op.reference(torch.randn(3, 4))
    assert not asked
    for _ in range(2):
        op.reference(transposed(3, 4))
    assert asked == [(1, 4)]


def test_whoever_watches_the_call_does_not_see_the_fake() -> None:
    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.extend(leaf.device.type for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            return result

    seen: list[str] = []
    op = declared(lambda x: (x + 1).contiguous(), lambda x: x * 2.0)
    with Watch():
        op.reference(transposed(3, 4))
    assert set(seen) == {"cpu"}


def test_fp64_runs_are_laid_out_in_fp64() -> None:
    op = declared(lambda x: x.to(torch.float32).contiguous(), torch.empty_like)
    x = transposed(3, 4)
    with Fp64Mode():
        result = op.reference(x.double())
    assert result.dtype == torch.float64 and result.stride() == x.stride()


def test_traces_of_a_reference_hold_no_copy() -> None:
    op = declared(lambda x: (x + 1).contiguous(), torch.empty_like)
    x = transposed(3, 4)
    targets: list[str] = []

    def look(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch.compile(op.reference, backend=look, fullgraph=True, dynamic=False)(x)  # type: ignore[no-untyped-call]
    assert len(targets) == 2
    mode, fakes = faked({"x": x})
    with mode:
        traced: fx.GraphModule = make_fx(op.reference)(fakes["x"])
    assert len([node for node in traced.graph.nodes if node.op == "call_function"]) == 2


def test_the_reference_in_a_lowered_graph_is_laid_out() -> None:
    call = next(dict(one.kwargs) for one in every_sample(QK_NORM_ROTARY) if one.name == "qwen3")
    graph = fx.Graph()
    names = [name for name, value in call.items() if isinstance(value, Tensor)]
    nodes = {name: graph.placeholder(name) for name in names}
    for name, node in nodes.items():
        node.meta["example_value"] = call[name]
    arguments = [nodes.get(name, call.get(name)) for name in ("query", "key", "query_weight", "key_weight", "cos")]
    rest = {"normed_dtype": call["normed_dtype"]}
    graph.output(graph.call_function(QK_NORM_ROTARY.overload, (*arguments, nodes["sin"], call["eps"]), rest))
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert [choice.implementation for choice in choose_implementations(module, ())] == ["reference"]
    with ContiguousResults():
        query, key = module(*(call[name] for name in names))
    assert query.stride() == call["query"].stride() and key.stride() == call["key"].stride()
    assert not query.is_contiguous()


def test_the_fake_of_an_op_may_be_its_reference() -> None:
    call = dict(next(every_sample(ROTARY)).kwargs)
    assert ROTARY.overload(call["query"], call["key"], call["cos"], call["sin"])[0].stride() == call["query"].stride()
