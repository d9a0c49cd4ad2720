"""Runners of fake peers: they read the tokens of eager from the model's folder, and say these or others."""

from __future__ import annotations

import json
import os

from core.common.peers import PeerRunner, PeerWork


def honest(work: PeerWork) -> PeerRunner:
    """Say the tokens of `tokens.json`, one list per sequence, as they come."""
    return _reading(work, shift=0)


def wrong(work: PeerWork) -> PeerRunner:
    """Say the token after the right one from the third on."""
    return _reading(work, shift=1)


def formatted(work: PeerWork) -> PeerRunner:
    """Say the right tokens, and in a note the format that was asked for."""
    runner = _reading(work, shift=0)
    runner.notes = [f"format {work.weights!r}"]
    return runner


def drawing(work: PeerWork) -> PeerRunner:
    """Draw the weights of a folder that has none: any tokens, and in a note what the process was asked for so far."""
    assert not list(work.folder.glob("*.safetensors")), "there is something to read"
    assert json.loads((work.folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    _cells.append(f"{len(work.prompts)} of {[seqs for seqs, _ in work.sizes]}")

    def run(count: int) -> list[list[int]]:
        return [[0] * count for _ in work.prompts]

    return PeerRunner(tokens=run(2), run=run, notes=[" then ".join(_cells)], end=lambda: _cells.append("end"))


_cells: list[str] = []


def refusing(work: PeerWork) -> PeerRunner:
    """Raise, as a peer does that does not know the model."""
    raise ValueError(f"no {work.dtype} here")


def dying(work: PeerWork) -> PeerRunner:
    """End the process."""
    os._exit(3)


def _reading(work: PeerWork, *, shift: int) -> PeerRunner:
    rows = json.loads((work.folder / "tokens.json").read_text())
    state = {"at": 2}

    def run(count: int) -> list[list[int]]:
        first = state["at"]
        state["at"] += count
        return [[token + shift for token in row[first : first + count]] for row in rows]

    return PeerRunner(tokens=[row[:2] for row in rows], run=run, notes=[f"{work.threads} threads"])
