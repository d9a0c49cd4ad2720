"""Area graphs, promises about many: the honest devices are in test_graphs.py; here each mistake meets its own case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from core_acme.memory import CARD
from core_acme.runner import RecordingBackend
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.graphs.backend import CallBackend, GraphKey
from core.common.graphs.tape import Tape
from core.device import Device
from core.host.selection import select_device
from core_conformance.case import Case
from core_conformance.cases.graphs import collect as graphs
from core_conformance.cases.graphs import many as graph_many
from core_conformance.trial import Trial
from tests.conformance.support import run_case
from tests.recording import acme

CPU = select_device("cpu")
LEAKED: list[Any] = []
Tensors = tuple[Tensor, ...]


def cases(device: Device) -> dict[str, Case]:
    return {case.id.removeprefix("graphs/"): case for case in graphs.collect(device, ConformanceProfile())}


@pytest.fixture(autouse=True)
def _nothing_leaked() -> Iterator[None]:
    yield
    LEAKED.clear()


class Few(RecordingBackend):
    """Drops all replays of a key after so many."""

    limit: ClassVar[int] = 40

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        self.counts = getattr(self, "counts", {})
        self.counts[key] = self.counts.get(key, 0) + 1
        return super().replay(key, step) if self.counts[key] <= self.limit else self._graphs[key].outputs


class Few500(Few):
    limit = 500


class FewCalls(CallBackend):
    """Returns from some call on what the call before gave."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        self.count = getattr(self, "count", 0) + 1
        if self.count < 200:
            self.last = super().replay(key, step)
        return self.last


class FewKeys(RecordingBackend):
    """Has a table of few keys, and starts again at its first place when it is full."""

    limit: ClassVar[int] = 8

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return super().replay(list(self._graphs)[list(self._graphs).index(key) % self.limit], step)


class FewKeys16(FewKeys):
    limit = 16


class Products(RecordingBackend):
    """Takes keys for one whose dimensions have equal products."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        if len(key.dims) == 2:
            area = torch.Size(key.dims).numel()
            same = (k for k in self._graphs if len(k.dims) == 2 and torch.Size(k.dims).numel() == area)
            key = next(k for k in same if k.part == key.part)
        return super().replay(key, step)


class FewOps(RecordingBackend):
    """Has place for few launches in a graph."""

    limit: ClassVar[int] = 64

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        with super().segment(key):
            yield
        del self._graphs[key].tape.calls[self.limit :]


class FewOps512(FewOps):
    limit = 512


class FewPrograms(RecordingBackend):
    """Replays nothing where four others are alive."""

    alive: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        FewPrograms.alive += 1
        self.one_too_many = FewPrograms.alive > 4

    def __del__(self) -> None:
        FewPrograms.alive -= 1

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return self._graphs[key].outputs if self.one_too_many else super().replay(key, step)


class LeaksReplays(RecordingBackend):
    """Keeps some memory of the host at each replay."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        LEAKED.append(torch.ones(2**16))
        return super().replay(key, step)


class LeaksCaptures(RecordingBackend):
    """Keeps some memory of the host at each capture."""

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        LEAKED.append(torch.ones(2**18))
        with super().segment(key):
            yield


class LeaksCard(RecordingBackend):
    """Keeps some memory of the device at each replay, of which the process knows nothing."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        LEAKED.append(Tape(num_bytes=2**16))
        CARD.add(LEAKED[-1])
        return super().replay(key, step)


FAULTS: list[tuple[type, str, str]] = [
    (Few, "many-replays/full", "replay 100, output 0"),
    (Few, "many-replays/segmented", "replay 100, output 1"),
    (Few500, "many-replays/piecewise", "replay 600, output 0"),
    (FewKeys, "many-keys/full", "of 24 keys, output 0"),
    (FewKeys16, "many-keys/full", "of 24 keys, output 0"),
    (FewKeys16, "many-keys/piecewise", "of 24 keys, output 0"),
    (Products, "many-keys/full", "decode[4, 3], call"),
    (Products, "many-keys/segmented", "decode[12, 1], call"),
    (FewOps, "many-ops/full", "replay 1 of 600 ops"),
    (FewOps512, "many-ops/full", "replay 1 of 600 ops"),
    (FewOps512, "many-ops/segmented", "replay 1 of 600 ops"),
    (FewPrograms, "many-programs/full", "program 4 of 8"),
    (FewPrograms, "many-programs/piecewise", "program 7 of 8"),
    (LeaksReplays, "memory-many/full", "memory of the process, over many replays"),
    (LeaksReplays, "memory-many/segmented", "memory of the process, over many replays"),
    (LeaksCaptures, "memory-many/full", "memory of the process, over many captures"),
    (LeaksCaptures, "memory-many/piecewise", "memory of the process, over many captures"),
    (LeaksCard, "memory-many/full", "memory of the device, over many replays"),
]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("backend", "name", "phrase"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_right_only_for_a_few_is_rejected(backend: type, name: str, phrase: str) -> None:
    device = acme(graph_backend=backend)
    failures = run_case(cases(device)[name], device)
    assert any(phrase in text for text in failures), failures


def test_a_compiled_program_that_stops_running_is_rejected() -> None:
    device = replace(CPU, graph_backend=FewCalls)
    failures = run_case(cases(device)["many-replays/compile"], device)
    assert {text.split(",")[0] for text in failures} == {"replay 300", "replay 600"}


def test_a_leak_is_reported_before_it_exhausts_the_machine() -> None:
    device = acme(graph_backend=LeaksReplays)
    assert run_case(cases(device)["memory-many/full"], device)
    most = graph_many.WARM_REPLAYS + graph_many.REPLAYS
    assert len(LEAKED) < most, "it went on to the end"


@pytest.mark.cases(2)
@pytest.mark.parametrize("status", ["", "Name:\tpython\n", None])
def test_where_the_size_of_the_process_is_not_told_a_note_says_so(
    status: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status"
    if status is not None:
        path.write_text(status)
    monkeypatch.setattr(graph_many, "STATUS", path)
    device = acme(graph_backend=LeaksReplays)
    trial = Trial(device.name, lambda: (device, ConformanceProfile()))
    cases(device)["memory-many/full"].run(trial)
    assert trial.failures == [], "the card's own account is right, and nothing else was looked at"
    assert trial.notes == [f"the size of the process was not looked at: {path} can't be read"]
    assert {text.name.split(",")[0] for text in trial.measurements} == {"memory of the device"}
