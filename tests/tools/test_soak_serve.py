"""tools/soak_serve.py: what it lets pass, what it calls a fault, and a short soak of a real server."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

pytest.importorskip("httpx", reason="needs the extra 'dev'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

import httpx

import soak_serve

KEY = ("This", 3, None)


def event(tokens: list[int]) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'token_ids': tokens}]})}\n\n"


def faults(answer: str, status: int = 200) -> list[str]:
    """Return what the soak finds wrong with an answer to KEY, whose tokens are 1, 2 and 3."""

    async def run() -> list[str]:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, text=answer))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            soak = soak_serve.Soak(client=client, rng=random.Random(0), expected={KEY: [1, 2, 3]})
            await soak_serve.read(soak)
            return soak.faults

    return asyncio.run(run())


def test_a_stream_that_is_right_is_no_fault() -> None:
    assert faults(event([1]) + event([2, 3]) + "data: [DONE]\n\n") == []


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (event([1]) + event([2, 3]), "ended without [DONE]"),
        (event([1]) + "data: [DONE]\n\n", "[1] instead of [1, 2, 3]"),
        (event([1]) + event([2, 4]) + "data: [DONE]\n\n", "[1, 2, 4] instead of"),
        (event([1]) + 'data: {"error": {"message": "gone"}}\n\n', "gone"),
    ],
)
def test_a_stream_that_is_lost_cut_or_another_is_a_fault(answer: str, phrase: str) -> None:
    (fault,) = faults(answer)
    assert phrase in fault


def test_another_status_is_a_fault() -> None:
    assert "status 500" in faults("", 500)[0]


TIGHT = ["--cache-tokens", "160", "--max-model-len", "128", "--speculative", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], TIGHT], ids=["roomy", "tight and drafting"])
def test_sixty_four_clients_get_their_own_answers_and_sigterm_loses_none(more: list[str]) -> None:
    options = ["--device", "cpu", "--mode", "off", "--max-num-seqs", "16", "--max-queue", "40", *more]
    report: Any = asyncio.run(soak_serve.soak(3, 64, 200, 0, options))
    assert report["faults"] == []
    counts = report["counts"]
    kinds = ("streams that are right", "slow streams that are right", "injected: left in the middle", "refused: 413")
    assert all(counts[kind] for kind in kinds) and counts["requests"] >= 200
    assert counts["streams over SIGTERM"] > 0 and bool(counts["preemptions"]) == bool(more)
