"""core/verify/fakes/calls.py: calls guessed from a schema."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from core.verify.fakes.calls import NoValue, call_text, guessed_calls

CPU = torch.device("cpu")


@pytest.fixture
def calls() -> Iterator[Any]:
    made = torch.library.Library("calls_test", "DEF")

    def guessed(arguments: str) -> list[dict[str, Any]]:
        made.define(f"op({arguments}) -> Tensor")
        return list(islice(guessed_calls(torch.ops.calls_test.op.default._schema, CPU), 400))

    yield guessed
    made._destroy()


def test_ranks_dtypes_and_strides_differ_and_no_call_comes_twice(calls: Any) -> None:
    found = calls("Tensor x")
    assert len({call_text(call) for call in found}) == len(found)
    tensors = [call["x"] for call in found]
    assert {x.dim() for x in tensors} == {0, 1, 2, 3, 4}
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool} <= {x.dtype for x in tensors}
    assert {x.is_contiguous() for x in tensors} == {True, False}
    assert (tensors[0].dtype, tuple(tensors[0].shape)) == (torch.float32, (5, 8)), "plain calls come first"


def test_the_usual_forms_are_among_them(calls: Any) -> None:
    shapes = {tuple(tuple(call[name].shape) for name in "xwb") for call in calls("Tensor x, Tensor w, Tensor b")}
    assert {((5, 8), (8,), (8,)), ((5, 8), (6, 8), (6,)), ((5, 8), (8, 6), (6,))} <= shapes


def test_every_kind_of_argument_gets_a_value(calls: Any) -> None:
    found = calls(
        "Tensor x, Tensor? y, int n, int dim, float eps, bool on, int[] sizes, Tensor[] xs, ScalarType to, Scalar by, "
        "Generator? g, str how='fast', *, Device where, float? low=None"
    )
    first = found[0]
    assert (first["y"], first["n"], first["dim"], first["how"], first["low"], first["where"]) == (
        None, 2, -1, "fast", None, CPU,
    )  # fmt: skip
    assert {call["n"] for call in found} == {0, 1, 2} and {call["on"] for call in found} == {True, False}
    assert any(isinstance(call["y"], Tensor) for call in found) and {call["low"] for call in found} >= {None, 0.5}
    assert all(len(call["xs"]) == 2 and call["how"] == "fast" and call["g"] is None for call in found)


def test_calls_are_the_same_each_time(calls: Any) -> None:
    schema = torch.ops.aten.add.Tensor._schema
    one, other = (list(islice(guessed_calls(schema, CPU), 40)) for _ in range(2))
    assert list(map(call_text, one)) == list(map(call_text, other))
    assert all(torch.equal(a["self"], b["self"]) for a, b in zip(one, other, strict=True))


def test_an_argument_that_nobody_can_guess_is_named(calls: Any) -> None:
    with pytest.raises(NoValue, match="argument 'how' of type str"):
        calls("Tensor x, str how")
