"""Host-side arguments that are inputs: their values come from the host memory in which the inputs are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_acme.runner import RecordingBackend
from torch import Tensor

import core
from core import InputSpec, Program
from core.common.graphs.backend import GraphKey
from core.compilation.capture.host_arguments import step_of_call, step_of_mirror
from core.errors import UsageError
from tests.recording import acme
from tests.support import refused

KEY = GraphKey("main", (4,))
SPECS = {
    "x": InputSpec(("n", 2), torch.float32),
    "lens": InputSpec(("n",), torch.int32, padding="sentinel", value=7),
    "starts": InputSpec(("n + 1",), torch.int32, padding="edge"),
}


class Listing(RecordingBackend):
    """Takes the values of two inputs from the host, and notes what it is given."""

    given: list[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        Listing.given = []

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        return frozenset({"lens", "starts"})

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        Listing.given.append(dict(step))


def scaled(x: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
    return x * lens[:, None] + starts[1:, None]


@pytest.fixture
def program() -> Program:
    device = replace(acme(update=True), graph_backend=Listing)
    return core.compile(scaled, device, inputs=SPECS, buckets=[4], mode="full", passes=())


def inputs(count: int = 3) -> dict[str, Tensor]:
    ints = torch.arange(count + 1, dtype=torch.int32)
    return {"x": torch.ones(count, 2), "lens": ints[1:] * 2, "starts": ints * 3}


def test_a_call_gives_the_padded_values_of_inputs_on_the_host(program: Program) -> None:
    assert torch.equal(program(**inputs()), scaled(**inputs()))
    assert Listing.given == [{"lens": [2, 4, 6, 7], "starts": [0, 3, 6, 9, 9]}]
    program(**inputs(4))
    assert Listing.given[1:] == [{"lens": [2, 4, 6, 8], "starts": [0, 3, 6, 9, 12]}]


def test_a_step_that_is_given_wins(program: Program) -> None:
    step = {"lens": [1, 1, 1, 1], "starts": [0] * 5}
    program(**inputs(), step=step)
    assert Listing.given == [step]
    with refused(UsageError, "['lens']", "captured with: lens, starts"):
        program(**inputs(), step={"lens": [1, 1, 1, 1]})


def test_staging_gives_the_values_of_its_mirror(program: Program) -> None:
    (key,), staging = program.keys, program.staging(mirrors=2)
    for turn in range(3):
        for name, tensor in staging.inputs(key).items():
            tensor.fill_(turn + len(name))
        staging.replay(key)
    assert Listing.given == [{"lens": [4 + turn] * 4, "starts": [6 + turn] * 5} for turn in range(3)]
    for elsewhere in ({"feed": {"lens": torch.ones(4, dtype=torch.int32)}}, {"kept": ("lens",)}):
        with refused(UsageError, "with lens from elsewhere"):
            staging.replay(key, **elsewhere)
    staging.replay(key, feed={"lens": torch.ones(4, dtype=torch.int32)}, step={"lens": [1] * 4, "starts": [0] * 5})
    assert program.host_arguments(key) == {"lens", "starts"}


def test_values_that_are_on_the_device_are_refused() -> None:
    given = {"x": torch.ones(3, 2), "lens": torch.ones(3, dtype=torch.int32, device="meta")}
    with refused(UsageError, "the values of 'lens' from the host", "is on meta", "pass lens on the host"):
        step_of_call(KEY, {"lens"}, given, specs=SPECS, sizes={"n": 4})
    with refused(UsageError, "'starts'", "the input is not given"):
        step_of_call(KEY, {"starts"}, given, specs=SPECS, sizes={"n": 4})
    kept = {"lens": InputSpec(("n",), torch.int32, padding="keep")}
    with refused(UsageError, "'lens'", "padding 'keep'"):
        step_of_call(KEY, {"lens"}, {"lens": torch.ones(3, dtype=torch.int32)}, specs=kept, sizes={"n": 4})


def test_arguments_that_are_no_inputs_are_the_callers() -> None:
    assert step_of_call(KEY, {"lengths"}, {}, specs=SPECS, sizes={"n": 4}) is None
    assert step_of_mirror(KEY, {"lengths"}, {}, ()) is None
