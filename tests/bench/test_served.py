"""The subject `core` on devices whose graphs take values from the host at each replay."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core_acme.runner import RecordingBackend

from core.bench.bench import Settings, bench
from core.bench.cells import BenchReport, Cell, Record
from core.bench.engines import Engines
from core.bench.model import open_model
from core.bench.rates import Rates
from core.bench.served import CoreSubject
from core.common.graphs.backend import GraphKey
from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError
from tests.recording import acme

RATES = Rates(bytes_per_s=1e10, flops_per_s=1e11, copy_bytes=1, matmul_size=1, dtype="float32")


class LengthsFromTheHost(RecordingBackend):
    """Graphs that take the lengths from the host too, and refuse a replay whose values are not those of its input."""

    names = frozenset({"seq_lens"})

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[GraphKey, Tensor] = {}
        self.given: list[list[int]] = []

    def capture_one(self, key: GraphKey, fn: Any, inputs: Any, after_warmup: Any) -> tuple[Tensor, ...]:
        """Remember where the lengths lie."""
        self.lengths[key] = inputs["seq_lens"]
        return super().capture_one(key, fn, inputs, after_warmup)

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        """Name the lengths."""
        return self.names

    def update(self, key: GraphKey, step: Any) -> None:
        """Take the values of one replay."""
        self.given.append(step["seq_lens"])

    def replay(self, key: GraphKey, step: object = None) -> tuple[Tensor, ...]:
        """Compare them with the input."""
        assert self.given and self.given.pop() == self.lengths[key].tolist()
        return super().replay(key)


def measured(backend: type[RecordingBackend]) -> BenchReport:
    device = acme(graph_backend=backend)
    loaded = open_model(None, "tiny-llama", device, "auto")[0]
    engine = EngineConfig(options=CompileOptions(mode="full"))
    settings = Settings(
        subjects=("eager", "core"), batches=(2,), context=9, prompts=(8,), rounds=2, steps=3, engine=engine
    )
    return bench(loaded, device, settings, title="tiny", rates=RATES)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [LengthsFromTheHost, RecordingBackend])
def test_a_graph_on_a_device_with_host_side_arguments_is_repeated_and_judged(backend: type[RecordingBackend]) -> None:
    report = measured(backend)
    assert [cell.cell.name for cell in report.cells] == ["decode/2", "prefill/8"]
    for cell in report.cells:
        (record,) = (record for record in cell.records if record.subject == "core")
        assert record.failure == "" and len(record.replay_ms) == 2
        assert not any("not judged" in note for note in record.notes)
        assert record.verdict["tokens_equal"] and record.verdict["logits"]["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("cache_tokens", [48, 32])
def test_steps_of_fewer_sequences_than_the_cell_has_are_no_steps_of_the_cell(cache_tokens: int) -> None:
    """Where the cache holds one sequence after the other, each step is quicker, and none is one of the batch."""
    device = acme()
    loaded = open_model(None, "tiny-llama", device, "auto")[0]
    engine = EngineConfig(options=CompileOptions(mode="full"), cache_tokens=cache_tokens)
    settings = Settings(subjects=("core",), batches=(4, 1), context=9, prompts=(), rounds=2, steps=3, engine=engine)
    report = bench(loaded, device, settings, title="tiny", rates=RATES)
    batch, single = (cell.records[0] for cell in report.cells)
    assert "does not hold all sequences" in batch.failure and not batch.rounds_ms
    assert not single.failure and single.rounds_ms


@pytest.mark.slow
def test_a_cell_longer_than_the_context_ends_with_an_error() -> None:
    """`core bench` refuses it before it begins; a script that measures may not."""
    device = acme()
    loaded = open_model(None, "tiny-llama", device, "auto")[0]
    assert loaded.max_position is not None
    steps = loaded.max_position
    cell = Cell(phase="decode", batch=1, tokens=9, steps=steps, rounds=1)
    engines = Engines(loaded, device, EngineConfig(options=CompileOptions(mode="full")), (cell,))
    subject = CoreSubject(engines, keep_logits=False)
    try:
        subject.open(cell, Record(subject="core"))
        with pytest.raises(ModelError, match="its sequences have ended"):
            subject.run(steps)
    finally:
        subject.free()


def test_prompts_are_computed_anew_in_each_round() -> None:
    """The same prompt each time would be found in the cache of prefixes."""
    device = acme()
    loaded = open_model(None, "tiny-llama", device, "auto")[0]
    cell = Cell(phase="prefill", batch=1, tokens=64, steps=2, rounds=2)
    engines = Engines(loaded, device, EngineConfig(options=CompileOptions(mode="off")), (cell,))
    try:
        engine = engines.open(cell)
        prompt = cell.prompts(loaded.vocab_size)[0]
        for _ in range(2):
            engine.generate([prompt], SamplingParams(max_new_tokens=1))
        assert engine.stats().reused == 0
    finally:
        engines.close()
