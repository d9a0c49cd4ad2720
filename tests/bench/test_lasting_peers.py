"""Peers whose process serves several cells, on weights that they draw: in turns, and before the model is made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench.peers import choosing, run
from core.cli import main
from core.common.peers import Peer
from core.device import Device, MemoryInfo
from tests.support import cpu

DRAWING = Peer(name="drawing", runner="tests.bench.fake_peers:drawing", draws_weights=True, lasting=True)
READING = Peer(name="reading", runner="tests.bench.fake_peers:honest")
SMALL = [
    "--device",
    "cpu",
    "--batch",
    "1,2",
    "--context",
    "8",
    "--rounds",
    "2",
    "--steps",
    "2",
    "--prefill",
    "",
    "--lowering",
    "inline",
]
CHOOSE = choosing.choose


def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer: Peer, *more: str) -> tuple[int, Any]:
    def choose(device: Device, *rest: Any) -> choosing.Choice:
        return CHOOSE(replace(device, parts=replace(cpu().parts, peers=(peer,))), *rest)

    monkeypatch.setattr("core.bench.peers.choosing.choose", choose)
    path = tmp_path / "bench.json"
    model = [] if any(each in ("--preset", "llama") for each in more) else ["--preset", "tiny-llama"]
    code = main(["bench", *model, *SMALL, "--subjects", f"{peer.name},core", "--json", str(path), *more])
    return code, json.loads(path.read_text()) if path.is_file() else None


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_one_process_serves_all_cells_and_its_tokens_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, apart: bool
) -> None:
    code, document = bench(monkeypatch, tmp_path, DRAWING, *(["--apart"] if apart else []))
    assert code == 0
    said = "measured before the model" if apart else "weights drawn by itself"
    for cell, wanted in zip(document["cells"], ("1 of [1, 2]", "1 of [1, 2] then end then 2 of [1, 2]"), strict=True):
        peer, core = cell["subjects"]
        assert (peer["subject"], core["subject"]) == ("drawing", "core")
        assert peer["notes"][0] == wanted and any(said in note for note in peer["notes"])
        assert peer["interleaved"] is not apart and peer["check"] is None
        assert peer["ms"]["median"] >= 0 and core["ms"]["median"] > 0 and not core["failure"]


@pytest.mark.parametrize(
    ("peer", "more", "phrase"),
    [(READING, ("--preset", "tiny-llama"), "reading"), (DRAWING, ("llama",), "MODEL 'llama'")],
)
def test_what_cant_run_apart_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    peer: Peer,
    more: tuple[str, ...],
    phrase: str,
) -> None:
    code, _ = bench(monkeypatch, tmp_path, peer, "--apart", *more)
    told = " ".join(capsys.readouterr().err.split())
    assert code == 2 and "--apart with" in told and phrase in told


def test_memory_of_an_ended_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SETTLED_S", 0.05)
    monkeypatch.setattr(run, "_POLL_S", 0.001)
    falling = iter([9, 7, 7, 4, 2])
    seen: list[int] = []

    def memory() -> MemoryInfo:
        seen.append(next(falling, 2))
        return MemoryInfo(used_bytes=0, total_bytes=10, peak_bytes=0, held_bytes=seen[-1])

    device = replace(cpu(), parts=replace(cpu().parts, memory=memory))
    run.wait_for_memory(device)
    assert seen[:5] == [9, 7, 7, 4, 2] and len(seen) > 6 and set(seen[5:]) == {2}


def test_memory_that_goes_on_falling_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_GIVEN_BACK_S", 0.02)
    monkeypatch.setattr(run, "_POLL_S", 0.001)
    left = iter(range(10_000, 0, -1))
    info = MemoryInfo(used_bytes=0, total_bytes=10_000, peak_bytes=0)
    parts = replace(cpu().parts, memory=lambda: replace(info, held_bytes=next(left)))
    run.wait_for_memory(replace(cpu(), parts=parts))
    assert next(left) > 5000
