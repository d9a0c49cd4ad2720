"""core_conformance/rules/sampling.py: which tokens of `core::sample` pass."""

from __future__ import annotations

import pytest
import torch

from core_conformance.rules.choices import judge_sample
from core_conformance.rules.judging import Judged, by_t1
from core_conformance.trial import Trial

LOGITS = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.4, 0.4, 0.1]]).log()
GREEDY = (0.0, 0.0, 1.0, 0.0)


def judged(tokens: torch.Tensor, *rows: tuple[float, ...]) -> Trial:
    kwargs = {"logits": LOGITS, "sampling_params": torch.tensor(rows)}
    trial = Trial("cpu", NotImplemented, 0)
    exact = torch.ops.core.sample(LOGITS.double(), kwargs["sampling_params"])
    judge_sample(trial, Judged("a call", kwargs, (tokens,), (exact,), lambda: (exact,), by_t1))
    return trial


@pytest.mark.parametrize(
    ("tokens", "second", "passes"),
    [
        ([0, 1], GREEDY, True),
        ([0, 2], GREEDY, True),
        ([0, 0], GREEDY, False),
        ([0, 4], GREEDY, False),
        ([0, -1], GREEDY, False),
        ([0, 1], (1.0, 0.0, 1.0, 0.39), True),
        ([0, 2], (1.0, 0.0, 1.0, 0.39), False),
        ([0, 1], (1.0, 0.0, 1.0, 0.400001), True),
        ([0, 2], (1.0, 0.0, 1.0, 0.400001), True),
        ([0, 0], (1.0, 0.0, 1.0, 0.400001), False),
        ([0, 2], (1.0, 0.0, 0.4, 0.9), True),
        ([0, 1], (1.0, 0.0, 0.4, 0.9), True),
        ([0, 2], (1.0, 0.0, 0.39, 0.9), False),
    ],
)
def test_a_token_passes_where_its_draw_leads(tokens: list[int], second: tuple[float, ...], passes: bool) -> None:
    assert (not judged(torch.tensor(tokens), GREEDY, second).failures) == passes


def test_draws_at_a_boundary_are_counted() -> None:
    trials = [judged(torch.tensor([0, token]), GREEDY, (1.0, 0.0, 1.0, 0.400001)) for token in (1, 2)]
    assert [len(trial.notes) for trial in trials] == [1, 0]


def test_tokens_are_one_int64_a_row() -> None:
    assert judged(torch.tensor([0]), GREEDY, GREEDY).failures
    assert judged(torch.tensor([0, 1], dtype=torch.int32), GREEDY, GREEDY).failures
