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
