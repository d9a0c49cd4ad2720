"""Peers whose process serves several cells, on weights that they draw: in turns, and before the model is made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench.peers import choosing
from core.cli import main
from core.common.peers import Peer
from core.device import Device
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
