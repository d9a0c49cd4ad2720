"""The paged route: room, padding, isolation of sequences, refusals, and leaving the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.device import Device, MemoryInfo
from core.engine.config import Phase, SamplingParams
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.masks import ALL, Reach
from core.engine.inspect.probe import position_difference
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.models.tiny_rules import WINDOW
from core.engine.paged.model import PagedModel
from core.engine.paged.runner import PagedRunner
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Part, Step
from core.errors import ModelError
from core.host.selection import select_device

CPU = torch.device("cpu")
LENGTH = 40
CONFIG = EngineConfig(
    max_num_seqs=3,
    block_size=8,
    decode_buckets=(1, 4),
    prefill_buckets=(48,),
    sampling=("greedy",),
    options=CompileOptions(lowering="inline", strict=True),
)
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [40, 41, 42, 43, 44])


def tiny(model_type: str, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=CPU, dtype=torch.float32).model


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with windows in one of its layers."""
    return tiny("gemma3_text")


@pytest.fixture(scope="module")
def runner(model: Any) -> Iterator[PagedRunner]:
    runner = PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=LENGTH)
    yield runner
    runner.close()


def new_sequence(index: int, prompt: list[int], max_new_tokens: int = 20) -> Sequence:
    return Sequence(index, list(prompt), SamplingParams(max_new_tokens=max_new_tokens))


def step(runner: PagedRunner, phase: Phase, sequences: list[Sequence]) -> torch.Tensor:
    """Run one step over all that is pending and append the tokens it gives; the logits are copied."""
    assert all(runner.cache.grow(sequence, len(sequence)) for sequence in sequences)
    with torch.no_grad():
        output = runner.run(Step(phase, tuple(Part(sequence, sequence.num_pending) for sequence in sequences)))
    assert output is not None
    for sequence, token in zip(sequences, output.tokens.tolist(), strict=True):
        sequence.num_computed = sequence.num_settled = len(sequence)
        sequence.generated.append(token)
        runner.cache.settle(sequence)
    assert torch.equal(output.tokens, output.logits.argmax(-1))
    return output.logits.clone()


def decode(runner: PagedRunner, prompts: list[list[int]], num_tokens: int) -> list[torch.Tensor]:
    """Generate greedily for all prompts at once; the logits of each, (num_tokens, vocabulary)."""
    sequences = [new_sequence(index, prompt) for index, prompt in enumerate(prompts)]
    assert all(runner.cache.join(sequence) for sequence in sequences)
    steps = [step(runner, "prefill", sequences)]
    steps += [step(runner, "decode", sequences) for _ in range(num_tokens - 1)]
    for sequence in sequences:
        runner.cache.release(sequence)
    return list(torch.stack(steps, dim=1))


def poison(runner: PagedRunner) -> None:
    """Fill the whole cache with NaN, the null block too; no block is what it was."""
    runner.cache.forget()
    for tensor in runner._paged._tensors:
        tensor.fill_(float("nan"))


@pytest.mark.slow
def test_the_route_names_its_layers(runner: PagedRunner) -> None:
    assert runner.route == "paged"
    assert runner.reason == "all 2 attention layers go through transformers' attention interface"


def test_a_batch_of_three_in_a_bucket_of_four_gives_what_each_gives_alone(runner: PagedRunner) -> None:
    together = decode(runner, list(PROMPTS), 2 * WINDOW)
    for prompt, mine in zip(PROMPTS, together, strict=True):
        (alone,) = decode(runner, [prompt], 2 * WINDOW)
        assert mine.argmax(-1).tolist() == alone.argmax(-1).tolist()
        torch.testing.assert_close(mine, alone, rtol=0, atol=1e-5)


def test_what_stood_in_the_cache_before_does_not_leak(runner: PagedRunner) -> None:
    before = decode(runner, list(PROMPTS), 12)
    poison(runner)
    after = decode(runner, list(PROMPTS), 12)
    for one, other in zip(before, after, strict=True):  # NaN is close to nothing
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_padding_writes_to_the_null_block_only(runner: PagedRunner) -> None:
    poison(runner)
    sequences = [new_sequence(index, prompt) for index, prompt in enumerate(PROMPTS)]
    assert all(runner.cache.join(sequence) for sequence in sequences)
    step(runner, "prefill", sequences)  # 19 tokens in a bucket of 48
    owned = {block for sequence in sequences for table in sequence.tables for block in table}
    written = {
        block
        for tensor in runner._paged._tensors
        for block in range(tensor.shape[0])
        if not bool(tensor[block].isnan().all())
    }
    assert written & owned
    assert written - {0} <= owned  # a kernel need not write padding at all
    for sequence in sequences:
        runner.cache.release(sequence)
    for tensor in runner._paged._tensors:
        tensor.zero_()


def free(runner: PagedRunner) -> list[int]:
    return [pool.num_free for pool in runner.cache.pools]


def test_a_sequence_takes_blocks_as_it_grows_and_returns_them(runner: PagedRunner) -> None:
    before = free(runner)
    assert before == [3 * 5, 3 * 5]  # three sequences of 40 positions in blocks of 8; one layer has a window
    short, long = new_sequence(0, [1] * 5, 4), new_sequence(1, [1] * 12, 1000)
    assert runner.cache.join(short) and runner.cache.join(long)
    assert [len(table) for each in (short, long) for table in each.tables] == [1, 0, 2, 0]  # windows as it goes on
    assert runner.cache.grow(short, 8) and len(short.tables[0]) == 1
    assert runner.cache.grow(short, 9) and len(short.tables[0]) == 2
    assert 0 not in short.tables[0] + long.tables[0]
    assert not set(short.tables[0]) & set(long.tables[0])
    for sequence in (short, long, short):
        runner.cache.release(sequence)
    assert (free(runner), short.tables) == (before, [])


def test_a_sequence_neither_joins_nor_grows_without_room(runner: PagedRunner) -> None:
    held = [new_sequence(index, [1] * 39, 1000) for index in range(3)]
    assert all(runner.cache.join(sequence) for sequence in held)
    late = new_sequence(3, [1], 1)
    assert not runner.cache.join(late)
    assert late.tables == []
    runner.cache.release(held[0])
    assert runner.cache.join(late)
    assert runner.cache.grow(late, 40) and not runner.cache.grow(held[1], 41)
    assert len(held[1].tables[0]) == 5
    for sequence in (*held[1:], late):
        runner.cache.release(sequence)


def test_one_trace_serves_all_phases_and_a_batch_of_one(runner: PagedRunner) -> None:
    traces = runner.report().traces
    assert [(trace.phase, [key.dims[0] for key in trace.buckets], trace.trace_of) for trace in traces] == [
        ("decode", [4, 1], ""),
        ("prefill", [48], "decode"),
    ]
    for trace in traces:
        assert sum(choice.op == "core::attention" for choice in trace.ops) == 2


def test_closing_gives_the_model_back_and_frees_the_cache() -> None:
    model = tiny("llama")
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
    config = replace(CONFIG, options=replace(CONFIG.options, mode="off"))
    runner = PagedRunner(model, select_device("cpu"), config, max_model_len=LENGTH)
    assert model.config._attn_implementation == "core"
    assert any(hasattr(module, "_core_attention") for module in model.modules())
    runner.close()
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "_core_attention") for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = tiny("recurrent_gemma")
    with pytest.raises(NotPageable, match="it keeps state outside attention"):
        PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=LENGTH)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "_core_attention") for module in model.modules())


def test_a_model_that_drops_its_causal_mask_is_refused() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False  # where transformers leaves the mask out, its attention looks ahead
    with pytest.raises(NotPageable, match="differ from its own forward"):
        PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=LENGTH)


def test_models_that_count_from_zero_are_told_from_others() -> None:
    assert position_difference(tiny("llama")) < 1e-6
    assert position_difference(tiny("camembert")) > 1e-2
    assert position_difference(tiny("bart")) == float("inf")


def test_chunks_within_the_context_are_a_group_of_their_own() -> None:
    model = PagedModel(tiny("llama4_text"), select_device("cpu"), CONFIG, max_model_len=LENGTH)
    assert [group.reach for group in model.groups] == [ALL, Reach(WINDOW, chunked=True)]
    assert model.asked.positions and not model.asked.indexers


def test_a_cache_larger_than_the_memory_is_refused_with_figures() -> None:
    device = select_device("cpu")
    full = MemoryInfo(used_bytes=2**30 - 1000, total_bytes=2**30, peak_bytes=0)
    small: Device = replace(device, parts=replace(device.parts, memory=lambda: full))
    model = tiny("llama")
    with pytest.raises(ModelError, match="one sequence has up to 40") as caught:
        PagedRunner(model, small, CONFIG, max_model_len=LENGTH)
    assert "0.00 GiB for it" in caught.value.found
    assert not any(hasattr(module, "_core_attention") for module in model.modules())


def test_memory_that_others_hold_is_told_and_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, made = tiny("llama"), torch.zeros, []

    def zeros(*args: Any, **options: Any) -> torch.Tensor:
        made.extend(args if isinstance(args[0], tuple) and len(args[0]) == 4 else ())  # keys or values of a layer
        if len(made) > 3:  # the second layer's values
            raise torch.OutOfMemoryError("tried to allocate 12 GiB,\n  others hold the rest")
        return real(*args, **options)

    monkeypatch.setattr("core.engine.paged.cache.torch.zeros", zeros)
    with pytest.raises(ModelError, match=r"a key/value cache of .* GiB \(120 tokens") as caught:
        PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=LENGTH)
    assert caught.value.found == "tried to allocate 12 GiB, others hold the rest"
    assert not any(hasattr(module, "_core_attention") for module in model.modules())
