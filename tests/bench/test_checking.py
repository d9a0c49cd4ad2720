"""The checks: tokens of the first round, logits against a reference, and which reference can be afforded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench import checking
from core.bench.cells import Cell, Record
from core.bench.checking import check, compare_tokens, reference_logits
from core.bench.presets import PRESETS, random_model
from tests.support import cpu

DECODE = Cell(phase="decode", batch=2, tokens=6, steps=2, rounds=3)


@pytest.fixture(scope="module")
def model() -> Any:
    preset = PRESETS["tiny-llama"]
    return random_model(preset.config(), torch_device=torch.device("cpu"), dtype=preset.dtype).model


def test_tokens_are_compared_up_to_the_end_of_the_first_round() -> None:
    ours, theirs = [[1, 2, 3, 4, 5], [6, 7, 8, 9]], [[1, 2, 3, 4, 0], [6, 7, 8, 9]]
    found = compare_tokens(DECODE, ours, theirs)
    counts = {"tokens_compared": 8, "tokens_agreeing": 8, "sequences_equal": 2}
    assert found == {"tokens_equal": True, "mismatch": "", **counts}
    found = compare_tokens(DECODE, ours, [[1, 2, 3, 4], [6, 0, 8, 9]])
    assert not found["tokens_equal"] and found["sequences_equal"] == 1 and found["tokens_agreeing"] == 7
    assert found["mismatch"] == "sequence 1, token 1: 7, not 0"


def _records(model: Any, error: float) -> list[Record]:
    """Return eager's record and one of `core` whose logits are off by that much in each element."""
    contexts = [[*prompt, 5] for prompt in DECODE.prompts(160)]
    with torch.no_grad():
        logits = torch.stack([model(input_ids=torch.tensor([c]), use_cache=False).logits[0, -1] for c in contexts])
    eager = Record(subject="eager", tokens=[[5, 1], [5, 2]], logits=logits)
    ours = Record(subject="core", tokens=[[5, 1], [5, 3]], logits=logits[1:] + error, logit_rows=[1])
    return [eager, ours]


def test_logits_are_judged_by_the_criterion(model: Any) -> None:
    records = _records(model, 0.0)
    check(DECODE, records, model, cpu())
    verdict = records[1].verdict
    assert verdict["logits"]["passed"] and verdict["logits"]["reference"] == "fp64 on the host"
    assert verdict["logits_difference"] == 0 and verdict["logits"]["rows"] == 1
    assert not verdict["tokens_equal"] and "tokens differ from eager" in records[1].notes[0]
    assert records[0].logits is None and records[0].verdict == {}


def test_wrong_logits_are_found(model: Any) -> None:
    records = _records(model, 1e-3)
    check(DECODE, records, model, cpu())
    assert not records[1].verdict["logits"]["passed"]


def test_sequences_with_other_tokens_are_not_judged(model: Any) -> None:
    records = _records(model, 0.0)
    records[1].tokens[1][0] = 4
    check(DECODE, records, model, cpu())
    assert "logits" not in records[1].verdict and "no sequence" in records[1].verdict["logits_skipped"]


def test_a_reference_that_costs_too_much_is_left_out_and_says_so(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_HOST_FLOPS", 0)
    found, why = reference_logits(model, [[1, 2, 3]], cpu())
    assert found == [] and "no fp64 reference" in why


def test_half_precision_is_judged_against_fp32_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS["tiny-moe"]
    half = random_model(preset.config(), torch_device=torch.device("cpu"), dtype=torch.bfloat16).model
    before = {name: tensor.clone() for name, tensor in half.state_dict().items()}
    exact, _ = reference_logits(half, [[1, 2, 3]], cpu())
    monkeypatch.setattr(checking, "_HOST_FLOPS", 0)
    found, how = reference_logits(half, [[1, 2, 3]], cpu())
    assert how == "fp32 on the device" and found[0].dtype is torch.float64
    torch.testing.assert_close(found[0], exact[0], rtol=1e-4, atol=1e-5)
    # The model itself stays as it was, in values and in dtype.
    assert all(torch.equal(tensor, before[name]) for name, tensor in half.state_dict().items())
    monkeypatch.setattr(checking, "_COPY_FACTOR", 1e15)
    assert "no fp32 reference" in reference_logits(half, [[1, 2, 3]], cpu())[1]
