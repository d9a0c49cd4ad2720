"""core/compilation/capture/plan.py: what a call does, decided from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import core
from core.common.graphs.backend import GraphKey
from core.compilation.capture.inputs import InputSpec
from core.compilation.capture.plan import Crop, Plan, make_plan
from core.compilation.trace.traced import OutputRef, OutputTree
from core.errors import CaptureError
from tests.support import cpu, refused

KEY = GraphKey("main", (4,))
SINGLE = OutputTree((OutputRef(index=0),), pytree.tree_flatten(0)[1])


class Cropping:
    """A cropper with a fixed answer."""

    def __init__(self, *crops: Crop, reads: frozenset[str] | None = None) -> None:
        self.reads = reads
        self._crops = list(crops)

    def crops(self, key: GraphKey, buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[Crop]:
        return self._crops


def plan(inputs: Mapping[str, Tensor], cropper: Cropping | None = None, **specs: InputSpec) -> Plan:
    specs = specs or {"x": InputSpec(("n", 2), torch.float32)}
    buffers = {name: torch.full(spec.resolve({"n": 4}), 9, dtype=spec.dtype) for name, spec in specs.items()}
    return make_plan(
        KEY,
        inputs,
        specs=specs,
        buffers=buffers,
        output=SINGLE,
        cropper=cropper or Cropping(),
        cloned=(),
    )


def test_a_full_input_is_copied_and_nothing_else() -> None:
    found = plan({"x": torch.ones(4, 2)})
    ((name, buffer, dtype),) = found.copies
    assert (name, buffer.shape, dtype) == ("x", (4, 2), torch.float32)
    assert (found.fills, found.crops, found.key, found.single) == ((), (), KEY, 0)


@pytest.mark.parametrize(("padding", "value"), [("zero", 0), ("sentinel", 7)])
def test_rows_past_the_input_are_filled(padding: Any, value: int) -> None:
    found = plan({"x": torch.ones(3, 2)}, x=InputSpec(("n", 2), torch.float32, padding=padding, value=value))
    assert found.copies[0][1].shape == (3, 2)
    ((tail, filled),) = found.fills
    assert (tail.shape, filled) == ((1, 2), value) and tail.data_ptr() == found.copies[0][1].data_ptr() + 24


def test_padding_covers_all_but_the_input_and_nothing_of_it() -> None:
    spec = InputSpec(("n", "n", "n"), torch.float32, padding="sentinel", value=7)
    found = plan({"x": torch.ones(2, 2, 2)}, x=spec)
    buffer = torch.full((4, 4, 4), 9.0)
    found = make_plan(
        KEY,
        {"x": torch.ones(2, 2, 2)},
        specs={"x": spec},
        buffers={"x": buffer},
        output=SINGLE,
        cropper=Cropping(),
        cloned=(),
    )
    for tail, value in found.fills:
        tail.fill_(value)
    assert (buffer[:2, :2, :2] == 9).all() and int((buffer == 7).sum()) == 64 - 8


def test_edge_repeats_the_last_real_row_and_keep_leaves_all() -> None:
    edge = plan({"x": torch.ones(3, 2)}, x=InputSpec(("n", 2), torch.float32, padding="edge"))
    ((tail, last),) = edge.fills
    assert isinstance(last, Tensor) and (tail.shape, last.shape) == ((1, 2), (1, 2))
    assert plan({"x": torch.ones(3, 2)}, x=InputSpec(("n", 2), torch.float32, padding="keep")).fills == ()


@pytest.mark.parametrize(("padding", "count"), [("copy", 3), ("edge", 0)])
def test_what_a_policy_can_not_fill_is_refused(padding: Any, count: int) -> None:
    with refused(CaptureError, f"input 'x' of shape ({count}, 2)", f"policy is {padding!r}", "exactly"):
        plan({"x": torch.ones(count, 2)}, x=InputSpec(("n", 2), torch.float32, padding=padding))


def test_bound_inputs_are_never_copied_or_filled() -> None:
    specs = {"x": InputSpec(("n", 2), torch.float32), "cache": InputSpec((9, 2), torch.float32, padding="bound")}
    found = plan({"x": torch.ones(3, 2), "cache": torch.ones(9, 2)}, **specs)
    assert [name for name, _, _ in found.copies] == ["x"] and len(found.fills) == 1


def test_an_input_that_the_graph_never_reads_is_not_copied() -> None:
    specs = {"x": InputSpec(("n", 2), torch.float32), "ids": InputSpec(("n",), torch.int64)}
    inputs = {"x": torch.ones(4, 2), "ids": torch.ones(4, dtype=torch.int64)}
    assert [n for n, _, _ in plan(inputs, Cropping(reads=frozenset({"x"})), **specs).copies] == ["x"]
    assert [n for n, _, _ in plan(inputs, Cropping(), **specs).copies] == ["x", "ids"]


def test_only_outputs_with_a_part_to_cut_are_cut() -> None:
    whole, part = (slice(None), slice(None)), (slice(3), slice(None))
    assert plan({"x": torch.ones(3, 2)}, Cropping(whole, part, ())).crops == ((1, part),)


STARTS = {"starts": InputSpec(("seqs + 1",), torch.int64, "edge")}


def strictly(model: Callable[..., Any], **more: InputSpec) -> core.Program:
    inputs = STARTS | more
    return core.compile(model, cpu(), inputs=inputs, buckets=[4, 8], lowering="inline", strict=True)


def squares(count: int) -> Tensor:
    return torch.arange(count) ** 2


@pytest.mark.cases(3)
@pytest.mark.parametrize("seqs", [1, 2, 3, 4, 5])
def test_a_size_that_is_the_dimension_below_a_declared_sum_is_cut(seqs: int) -> None:
    """A single sequence too: that `s0 - 1` is not 1 is a condition of the trace, but not one on the model's way."""
    program = strictly(lambda starts: (starts[1:] - starts[:-1], starts * 2))
    starts = squares(seqs + 1)
    lengths, doubled = program(starts=starts)
    assert torch.equal(lengths, starts[1:] - starts[:-1]) and torch.equal(doubled, starts * 2)
    assert not program.report().fallbacks and sum(program.report().replays.values()) == 1


def test_lengths_from_starts_meet_an_input_of_that_dimension() -> None:
    program = strictly(lambda starts, base: base + starts[1:] - starts[:-1], base=InputSpec(("seqs",), torch.int64))
    starts, base = squares(4), torch.tensor([10, 20, 30])
    assert program(starts=starts, base=base).tolist() == [11, 23, 35]


@pytest.mark.parametrize(
    "model",
    [lambda starts: starts[2:], lambda starts: torch.cat([starts, starts[:1]]), lambda starts: starts[1:].repeat(2)],
    ids=["two less", "one more", "twice"],
)
def test_other_sizes_computed_from_a_declared_sum_are_refused(model: Callable[..., Any]) -> None:
    program = strictly(model)
    assert torch.equal(program(starts=squares(5)), model(squares(5)))
    with refused(CaptureError, "where padding lies in it is unknown", "fill a bucket exactly"):
        program(starts=squares(4))


def test_a_branch_on_the_dimension_below_a_declared_sum_is_still_held() -> None:
    program = strictly(lambda starts: starts[1:] + 1 if starts.shape[0] - 1 > 3 else starts[1:] - 1)
    with refused(CaptureError, "branches on a size", "add a bucket of this size"):
        program(starts=squares(4))
