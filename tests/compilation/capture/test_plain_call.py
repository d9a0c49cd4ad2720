"""core/compilation/capture/plain_call.py: the structure of results, and where padding lies in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from core.common.graphs.backend import GraphKey
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.capture.plain_call import ObservedCropper, OutputDims, UntracedCall
from core.errors import CaptureError, UsageError
from tests.support import refused

SPECS = {"x": InputSpec(("n", 2), torch.float32)}


def call(function: Any, **options: Any) -> UntracedCall:
    return UntracedCall(function, {"x": torch.ones(4, 2)}, {}, **options)


def test_results_are_flat_and_can_be_rebuilt() -> None:
    bound = call(lambda x: {"sum": x.sum(0), "rest": [x, None, (x * 2, "text", True)]})
    outputs = bound()
    assert [tuple(t.shape) for t in outputs] == [(2,), (4, 2)] and bound.output is not None
    own = torch.zeros(1, 2)
    rebuilt = bound.output.rebuild(outputs, {"x": own})
    assert rebuilt["rest"][0] is own, "an input that is handed through is the caller's"
    assert rebuilt["rest"][1:] == [None, (outputs[1], "text", True)] and rebuilt["sum"] is outputs[0]


def test_guards_arrive_by_name_and_results_need_no_grad() -> None:
    weight = torch.ones(2, requires_grad=True)
    bound = UntracedCall(lambda x, greedy: x * weight if greedy else x, {"x": torch.ones(1, 2)}, {"greedy": True})
    (output,) = bound()
    assert not output.requires_grad and bound.output is not None and bound.output.is_single


def test_a_result_that_is_no_tree_of_tensors_is_refused() -> None:
    with refused(CaptureError, "returns 'object'", "return tensors"):
        call(lambda x: (x, object()))()


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x[0].zero_(), lambda x: torch.add(x, 1, out=x)])
def test_a_callable_that_writes_into_its_input_is_refused(write: Any) -> None:
    remedies = ('padding="bound"', "options=core.CompileOptions(bound={'x': tensor})")
    with refused(CaptureError, "writes into its input 'x'", "static buffers", *remedies):
        call(write)()
    call(write, writable=("x",))()


def test_a_size_among_the_results_is_refused_where_calls_may_be_padded() -> None:
    with refused(CaptureError, "returns the number 4", "the bucket's size", "read the size off the inputs"):
        call(lambda x: (x + 1, x.shape[0]), padded=True)()
    assert call(lambda x: (x + 1, x.shape[0]))()[0].shape == (4, 2)


def cropper(
    shapes: Mapping[Any, Sequence[tuple[int, ...]]], specs: Mapping[str, InputSpec] = SPECS, **options: Any
) -> tuple[ObservedCropper, list[GraphKey]]:
    """Return a cropper that has seen outputs of these shapes, by bucket, and the keys of the buckets."""
    dims = tuple(dict.fromkeys(dim for spec in specs.values() for dim in spec.dims()))
    sizes = [dict(zip(dims, (key,) if isinstance(key, int) else key, strict=True)) for key in shapes]
    table = BucketTable.build(specs, sizes)
    found = ObservedCropper(table, specs, **options)
    keys = [GraphKey("main", tuple(size.values())) for size in sizes]
    for key, outputs in zip(keys, shapes.values(), strict=True):
        found.observe(key, [torch.empty(shape) for shape in outputs])
    return found, keys


def crops(found: ObservedCropper, key: GraphKey, specs: Mapping[str, InputSpec] = SPECS, **real: int) -> list[Any]:
    inputs = {name: torch.empty(spec.resolve(real)) for name, spec in specs.items()}
    return found.crops(key, {}, inputs)


ALL = slice(None)


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [
        ((4, 2), (8, 2), (slice(3), ALL)),
        ((2, 4), (2, 8), (ALL, slice(3))),
        ((4, 4), (8, 8), (slice(3), slice(3))),
        ((4, 8), (8, 8), (slice(3), ALL)),  # a size that happens to be a bucket's
        ((7,), (7,), (ALL,)),
        ((), (), ()),
    ],
)
def test_outputs_are_cut_as_the_buckets_tell(small: Any, large: Any, expected: Any) -> None:
    found, keys = cropper({4: [small], 8: [large]})
    assert crops(found, keys[0], n=3) == [expected] and crops(found, keys[1], n=3) == [expected]
    assert crops(found, keys[0], n=4) == [], "a full bucket has nothing to cut"


@pytest.mark.parametrize(
    "shapes",
    [
        {4: [(4, 2)]},  # one bucket tells nothing
        {4: [(2,)]},
        {4: [(8,)], 8: [(16,)]},
        {4: [(5,)], 8: [(9,)]},
        {4: [(4,)], 8: [(4,)], 16: [(16,)]},
        {4: [(4,), (4,)], 8: [(8,)]},  # outputs of another form tell nothing of these
    ],
)
def test_what_the_buckets_do_not_tell_is_refused(shapes: Any) -> None:
    found, keys = cropper(shapes)
    with refused(CaptureError, "padding to main[4]", "dimension 0 of output 0", "core.CompileOptions(outputs=["):
        crops(found, keys[0], n=3)
    assert crops(found, keys[0], n=4) == []


TWO = {"x": InputSpec(("n", "m"), torch.float32)}


def test_two_dimensions_are_told_apart_where_the_buckets_do() -> None:
    found, keys = cropper({(4, 8): [(4, 8)], (4, 16): [(4, 16)], (8, 16): [(8, 16)]}, TWO)
    assert crops(found, keys[2], TWO, n=5, m=9) == [(slice(5), slice(9))]
    found, keys = cropper({(4, 4): [(4, 4)], (8, 8): [(8, 8)]}, TWO)
    with refused(CaptureError, "does not tell"):
        crops(found, keys[1], TWO, n=5, m=5)
    found, keys = cropper({(4, 8): [(3,)], (4, 16): [(3,)]}, TWO)
    assert crops(found, keys[1], TWO, n=4, m=9) == [(ALL,)]
    with refused(CaptureError, "does not tell"):  # n never changed: it may lie in the output or not
        crops(found, keys[1], TWO, n=3, m=16)


def test_declared_outputs_are_cut_as_declared() -> None:
    found, keys = cropper({4: [(4, 2), (5,), (4,)]}, outputs=[("n", None), ("n + 1",), (4,)])
    assert crops(found, keys[0], n=3) == [(slice(3), ALL), (slice(4),), (ALL,)]


@pytest.mark.parametrize(
    "outputs", [[("n",)], [("n", None), ("n",)], [], [("tokens", None)], [("n + 1", None)], [(3, None)], [(None, "n")]]
)
def test_a_declaration_that_the_outputs_contradict_is_refused(outputs: list[OutputDims]) -> None:
    with refused(UsageError, "outputs=(", "main[4] returns tensors of shapes [(4, 2)]", "declare each output"):
        cropper({4: [(4, 2)]}, outputs=outputs)


def test_each_guard_and_phase_is_told_by_its_own_buckets() -> None:
    table = BucketTable.build(SPECS, {"decode": [4, 8], "prefill": [4, 8]}, {"wide": (False, True)})
    found = ObservedCropper(table, SPECS)
    shapes: dict[tuple[str, bool], Any] = {
        ("decode", False): lambda n: (n, 2),
        ("decode", True): lambda n: (2, n),
        ("prefill", False): lambda n: (2, 2),
        ("prefill", True): lambda n: (n, n),
    }
    for keys in table.phases.values():
        for key in keys:
            found.observe(key, [torch.empty(shapes[key.phase, bool(key.guards[0][1])](key.dims[0]))])
    got = {(phase, wide): crops(found, GraphKey(phase, (8,), (("wide", wide),)), n=3)[0] for phase, wide in shapes}
    assert list(got.values()) == [(slice(3), ALL), (ALL, slice(3)), (ALL, ALL), (slice(3), slice(3))]
