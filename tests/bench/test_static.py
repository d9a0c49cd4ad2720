"""The subjects on the static cache: turns on one cache, what torch.compile did, and what is left when they close."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench import static
from core.bench.cells import Cell, Record
from core.bench.presets import PRESETS, random_model
from core.bench.rounds import measure
from core.bench.static import SharedCache, StaticSubject, forward, rewind, sharing_copy
from core.engine.static.cache import static_cache
from core.errors import ModelError
from tests.support import cpu, refused


@pytest.fixture(scope="module")
def model() -> Any:
    preset = PRESETS["tiny-llama"]
    return random_model(preset.config(), torch_device=torch.device("cpu"), dtype=preset.dtype).model


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let torch.compile trace, but not generate code, which takes the host minutes; yield the modes asked for."""
    modes: list[str] = []
    real = torch.compile

    def stand_in(function: Callable[..., Any], *, mode: str, dynamic: bool) -> Any:
        modes.append(mode)
        return real(function, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", stand_in)
    yield modes
    torch.compiler.reset()


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_copy_shares_weights_and_nothing_else(model: Any) -> None:
    copied: Any = sharing_copy(model)
    assert all(a is b for a, b in zip(copied.parameters(), model.parameters(), strict=True))
    assert copied.config is not model.config
    copied.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_subjects_in_turns_generate_what_each_would_alone(model: Any, traced_only: list[str]) -> None:
    cell = Cell(phase="decode", batch=2, tokens=9, steps=3, rounds=3)
    shared = SharedCache(model, cpu())
    subjects = [
        StaticSubject("eager", shared, keep_logits=True),
        StaticSubject("compile", shared),
        StaticSubject("max-autotune", shared),
    ]
    records, _ = measure(subjects, cell, cpu())
    assert [record.failure for record in records] == [""] * 3
    assert traced_only == ["default", "max-autotune"]
    expected = [_greedy(model, prompt, 2 + 9) for prompt in cell.prompts(160)]
    assert all(record.tokens == expected for record in records)
    # The logits are those after the first token behind each prompt.
    logits = records[0].logits
    assert logits is not None and logits.argmax(-1).tolist() == [tokens[1] for tokens in expected]
    assert records[0].start_s == 0 < records[1].start_s
    assert records[1].details["compile"] == {"graphs": 1, "graph_breaks": 0, "break_reasons": [], "recompiles": 0}
    assert shared.cache is None and shared.first is None


def test_prefill_starts_from_an_empty_cache_each_time(model: Any, traced_only: list[str]) -> None:
    cell = Cell(phase="prefill", batch=1, tokens=11, steps=2, rounds=2)
    shared = SharedCache(model, cpu())
    records, _ = measure([StaticSubject("eager", shared), StaticSubject("compile", shared)], cell, cpu())
    expected = [_greedy(model, cell.prompts(160)[0], 1)]
    assert [record.failure for record in records] == ["", ""]
    assert [record.tokens for record in records] == [expected, expected]


@pytest.mark.slow
def test_graph_breaks_are_counted_with_their_reason(
    model: Any, traced_only: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: Any, cache: Any) -> Callable[[Tensor], Tensor]:
        def step(ids: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=ids, past_key_values=cache).logits[:, -1]
            torch._dynamo.graph_break("a break on purpose")
            return logits.argmax(-1, keepdim=True)

        return step

    monkeypatch.setattr(static, "forward", broken)
    cell = Cell(phase="prefill", batch=1, tokens=5, steps=1, rounds=1)
    (record,), _ = measure([StaticSubject("compile", SharedCache(model, cpu()))], cell, cpu())
    counts = record.details["compile"]
    assert counts["graph_breaks"] >= 1 and counts["graphs"] >= 1 and counts["recompiles"] == 0
    assert any("a break on purpose" in reason for reason in counts["break_reasons"]), counts


@pytest.mark.slow
def test_what_is_compiled_while_it_is_measured_is_said(model: Any, traced_only: list[str]) -> None:
    shared = SharedCache(model, cpu())
    subject = StaticSubject("compile", shared)
    cell = Cell(phase="prefill", batch=1, tokens=5, steps=1, rounds=1)
    record = Record(subject="compile")
    subject.open(cell, record)
    subject._prompt = subject._prompt[:3]  # another size than the one it was compiled for
    subject.run(1)
    subject.finish(record)
    subject.close()
    assert record.details["compile"]["recompiles"] == 1 and "compiled while it was measured" in record.notes[0]


def test_a_cache_rewound_forgets(model: Any) -> None:
    cache = static_cache(model, 16)
    step = forward(model, cache)
    with torch.no_grad():
        first = step(torch.tensor([[5, 6, 7]]))
        step(torch.tensor([[9]]))
        rewind(cache, 0)
        assert torch.equal(step(torch.tensor([[5, 6, 7]])), first)


def test_a_cache_that_counts_otherwise_is_refused() -> None:
    class Layer:
        cumulative_length = 3

    class Counted:
        layers = (Layer(),)

    with refused(ModelError, "no tensor"):
        rewind(Counted(), 0)
