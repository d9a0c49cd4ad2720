"""A device that holds only so many graphs: what is captured stays, the rest is served by it or eagerly, and told."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_acme.runner import RecordingBackend
from torch import Tensor

import core
from core import InputSpec
from core.common.graphs.backend import GraphKey
from core.compilation.pipeline import capture_order
from core.device import Device
from core.errors import CaptureError, GraphResourcesError
from tests.recording import acme
from tests.support import refused

ROWS = {"x": InputSpec(("n", 4), torch.float32)}


class Limited(RecordingBackend):
    """Holds so many graphs."""

    limit = 3

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        if len(self._graphs) == self.limit:
            raise GraphResourcesError(f"capturing {key}", found="no stream is left", remedy="ask for fewer")
        with super().segment(key):
            yield


def limited(limit: int, **capabilities: Any) -> Device:
    return replace(acme(update=False, **capabilities), graph_backend=type("L", (Limited,), {"limit": limit}))


def doubled(x: Tensor, sampling: str = "greedy") -> Tensor:
    return x * (2 if sampling == "greedy" else 3)


def rows(count: int) -> Tensor:
    return torch.arange(count * 4.0).view(count, 4)


@pytest.mark.parametrize("mode", ["full", "segmented"])
def test_larger_captured_buckets_serve_in_place_of_dropped_ones(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "core.compilation.compile"):
        program = core.compile(doubled, limited(2), inputs=ROWS, buckets=[1, 2, 4, 8], mode=mode, passes=())
    assert [str(key) for key in program.keys] == ["main[8]", "main[4]"]
    (line,) = [record.message for record in caplog.records if "not captured" in record.message]
    assert line.startswith("not captured: main[2], main[1]: no stream is left")
    for count in (1, 2, 2, 3, 8, 9):
        assert torch.equal(program(x=rows(count)), doubled(rows(count)))
    report = program.report()
    assert line in report.notes
    assert {str(key): reason for key, reason in report.dropped.items()} == dict.fromkeys(
        ("main[2]", "main[1]"), "no stream is left"
    )
    assert report.stand_ins == {"main[4] in place of main[1]": 1, "main[4] in place of main[2]": 2}
    assert list(report.fallbacks.values()) == [1]  # nine rows fit in no bucket, with or without the dropped ones
    assert sorted(report.replays.values()) == [1, 4]
    assert json.loads(json.dumps(report.to_json()))["dropped"]["main[1]"] == "no stream is left"
    assert "2 replays of main[4] in place of main[2]" in str(report)
    assert program.bucket("main", {"n": 1}) == program.keys[1]
    assert str(program.stand_in("main", {"n": 1})) == "main[1]"
    assert program.stand_in("main", {"n": 3}) is program.stand_in("main", {"n": 9}) is None


def test_every_phase_and_guard_gets_its_largest_bucket_first() -> None:
    buckets = {"decode": [1, 2, 4], "prefill": [16, 8]}
    guards = {"decode": {"sampling": ("greedy", "random")}}
    program = core.compile(doubled, limited(3), inputs=ROWS, buckets=buckets, guards=guards, mode="full", passes=())
    assert [str(key) for key in program.keys] == [
        "prefill[16]",
        "decode[4, sampling=greedy]",
        "decode[4, sampling=random]",
    ]
    for sampling in ("greedy", "random"):
        out = program("decode", x=rows(1), guards={"sampling": sampling})
        assert torch.equal(out, doubled(rows(1), sampling))
    assert torch.equal(program("prefill", x=rows(8)), doubled(rows(8)))
    assert sum(program.report().stand_ins.values()) == 3 and not program.report().fallbacks


def test_what_has_no_graph_at_all_runs_eagerly_and_is_counted() -> None:
    buckets = {"decode": [1, 2], "prefill": [16]}
    program = core.compile(doubled, limited(1), inputs=ROWS, buckets=buckets, mode="full", passes=())
    assert [str(key) for key in program.keys] == ["prefill[16]"]
    for _ in range(2):
        assert torch.equal(program("decode", x=rows(2)), doubled(rows(2)))
    assert program.report().fallbacks == {"decode: its buckets could not be captured: no stream is left": 2}
    assert program.bucket("decode", {"n": 1}) is None


def test_a_device_without_any_room_runs_all_eagerly() -> None:
    program = core.compile(doubled, limited(0), inputs=ROWS, buckets=[1, 2], mode="full", passes=())
    assert not program.keys and torch.equal(program(x=rows(2)), doubled(rows(2)))
    assert list(program.report().fallbacks.values()) == [1]


def test_a_strict_program_raises() -> None:
    with refused(GraphResourcesError, "capturing main[4]", "no stream is left"):
        core.compile(doubled, limited(1), inputs=ROWS, buckets=[4, 8], mode="full", passes=(), strict=True)


def test_a_capture_that_fails_otherwise_is_no_shortage() -> None:
    def reads(x: Tensor) -> Tensor:
        return x * float(x.sum())

    with refused(CaptureError, "gives the host a value"):
        core.compile(reads, limited(9), inputs=ROWS, buckets=[4, 8], mode="full", passes=())


def test_the_order_of_capture() -> None:
    keys = {
        "a": [GraphKey("a", (size,), (("g", g),)) for size in (1, 2) for g in (False, True)],
        "b": [GraphKey("b", (4, 1)), GraphKey("b", (1, 8))],
        "c": [],
    }
    assert list(map(str, capture_order(keys))) == [
        "b[1, 8]",
        "a[2, g=False]",
        "a[2, g=True]",
        "b[4, 1]",
        "a[1, g=False]",
        "a[1, g=True]",
    ]
