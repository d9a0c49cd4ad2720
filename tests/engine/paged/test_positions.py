"""Models that count positions themselves on the paged route: what they give, and faults that the self-check finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.engine.check.eager import eager_generate
from core.engine.config import SamplingParams
from core.engine.inspect.attention import NotPageable, implementation
from core.engine.inspect.positions import Rows
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.paged import runner as paged_runner
from core.engine.paged.model import PagedModel
from core.engine.paged.runner import PagedRunner
from core.engine.serve.engine import Engine
from core.engine.steps.positions import ServedPositions
from core.engine.steps.runner import EngineConfig
from core.engine.steps.step import Step
from core.host.selection import select_device
from tests.marks import slow_except
from tests.recording import acme

CPU = torch.device("cpu")
EAGER = EngineConfig(max_num_seqs=3, block_size=8, prefill_buckets=(48,), options=CompileOptions(mode="off"))
SERVING = EngineConfig(
    max_num_seqs=4,
    max_model_len=64,
    block_size=8,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    max_step_tokens=16,
    decode_steps=1,
    sampling=("greedy",),
    options=CompileOptions(lowering="inline", strict=True),
)
SHARED = [3 + 5 * i % 150 for i in range(25)]
"""The beginning of several prompts: three blocks, and longer than a step."""


def tiny(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    return build_model(tiny_config(model_type), torch_device=CPU, dtype=dtype).model


def page(model: Any, max_model_len: int = 64) -> None:
    PagedRunner(model, select_device("cpu"), EAGER, max_model_len=max_model_len).close()


def alone(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Generate by the model's own forward and cache, which counts for itself."""
    ((tokens,), _) = eager_generate(model, [prompt], num_tokens, positions=False)
    return tokens


def serve_staggered(engine: Engine) -> None:
    """Serve eight requests that join at different steps, three of them with one beginning, two of them aborted."""
    prompts = [
        [*SHARED, 40],
        [20, 21, 22],
        [50] * 7,
        [*SHARED, 41, 42],
        [9],
        [60 + i for i in range(18)],
        [7, 8],
        SHARED,
    ]
    counts, given = [12, 30, 9, 20, 24, 8, 12, 10], dict[int, list[int]]()
    waiting, ids, step = list(range(len(prompts))), dict[int, int](), 0
    while waiting or engine.has_unfinished:
        if waiting and step % 3 == 0:
            index = waiting.pop(0)
            params = SamplingParams(max_new_tokens=counts[index], ignore_eos=True)
            ids[engine.add_request(prompts[index], params)] = index
        for output in engine.step():
            given.setdefault(ids[output.request_id], []).extend(output.token_ids)
        for request, index in ids.items():
            if index in (1, 3) and len(given.get(index, [])) >= 4:
                engine.abort(request)
        step += 1
    with implementation(engine.loaded.model, engine.native_attention), torch.no_grad():
        for index, prompt in enumerate(prompts):
            assert given[index] == alone(engine.loaded.model, prompt, len(given[index])), index
    ended = [len(given[index]) for index in range(8)]
    assert ended[1] < 30 and ended[3] < 20 and ended[4:] == [24, 8, 12, 10]
    stats = engine.stats()
    assert stats.chunked >= 2 and stats.mixed_steps >= 2 and stats.reused >= 48


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", slow_except(["roberta", "whisper", "marian", "pegasus", "bart", "bigbird_pegasus"], "roberta")
)
def test_requests_that_come_and_go_get_the_tokens_of_each_alone(model_type: str) -> None:
    loaded = build_model(tiny_config(model_type), torch_device=CPU, dtype=torch.float32)
    with Engine(loaded, select_device("cpu"), SERVING) as engine:
        assert engine.route == "paged" and set(engine.report().modes.values()) == {"compile"}
        serve_staggered(engine)


@pytest.mark.parametrize("model_type", slow_except(["bart", "roberta"], "bart"))
def test_drafts_are_verified_at_their_positions_in_graphs_that_only_replay(model_type: str) -> None:
    loaded = build_model(tiny_config(model_type), torch_device=CPU, dtype=torch.float32)
    with Engine(loaded, acme(), replace(SERVING, speculative=3)) as engine:
        assert engine.report().modes == {"decode": "full", "prefill": "piecewise", "verify": "full"}
        serve_staggered(engine)
        assert engine.stats().accepted["ngram"] >= 8


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_type", ["bart", "roberta", "marian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_is_closed_gives_the_modules_their_own_count_back(model_type: str, dtype: torch.dtype) -> None:
    model, ids = tiny(model_type, dtype), torch.arange(3, 12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        page(model)
        assert torch.equal(model(input_ids=ids).logits, before)
    assert not any("forward" in vars(module) or hasattr(module, "_core_lookup") for module in model.modules())


def _without_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Rows.of
    monkeypatch.setattr(Rows, "of", lambda self, *where: own(replace(self, first=self.first - 1), *where))


def _of_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Callable[..., dict[str, Tensor]] = ServedPositions.begin
    monkeypatch.setattr(ServedPositions, "begin", lambda self, at, tokens: own(self, at.roll(1, dims=1), tokens))


def _from_zero_in_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    own = paged_runner.step_tensors

    def step_tensors(step: Step, **how: Any) -> dict[str, Tensor]:
        found = own(step, **how)
        if step.phase == "prefill":
            found["position_ids"] = torch.cat([torch.arange(part.num_tokens) for part in step.parts])
        return found

    monkeypatch.setattr(paged_runner, "step_tensors", step_tensors)


@pytest.mark.cases(3)
@pytest.mark.parametrize("model_type", ["bart", "roberta"])
@pytest.mark.parametrize("plant", [_without_offset, _of_another_sequence, _from_zero_in_each_chunk])
def test_wrong_positions_are_refused_by_the_self_check(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], model_type: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(NotPageable, match="step on the paged cache differ from its own forward"):
        page(tiny(model_type))


def test_padding_among_generated_tokens_has_the_row_that_the_model_gives_it() -> None:
    model = tiny("roberta")
    prompt, given = [3, 4, 5], [[7, 0, 9, 10, 0, 11]]
    _, (expected,) = eager_generate(model, [prompt], 6, positions=False, given=given)
    positions = torch.arange(3, 9)
    rows = Rows(first=1, padding=(0, 0)).of(positions, torch.tensor(given[0]))
    assert rows.tolist() == [4, 0, 6, 7, 0, 9]
    cache: dict[str, Any] = {"use_cache": True}
    found = []
    with torch.no_grad():
        tokens, places = torch.tensor([prompt]), torch.arange(1, 4)
        for index in range(6):
            out = model(input_ids=tokens, position_ids=places[None], return_dict=True, **cache)
            cache = {"past_key_values": out.past_key_values, "use_cache": True}
            found.append(out.logits[0, -1])
            tokens, places = torch.tensor([given[0][index : index + 1]]), rows[index : index + 1]
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["bart", "roberta"])
def test_the_memory_of_a_step_longer_than_the_table_is_measured(model_type: str) -> None:
    config = replace(EAGER, prefill_buckets=(300,))
    model = tiny(model_type)
    assert PagedModel(model, select_device("cpu"), config, max_model_len=64).step_bytes() >= 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_step_longer_than_the_table_reads_no_row_beyond_it() -> None:
    config = replace(EAGER, prefill_buckets=(300,), cache_tokens=512)
    loaded = build_model(tiny_config("roberta"), torch_device=CPU, dtype=torch.float32)
    assert loaded.max_position == 255
    with Engine(loaded, select_device("cpu"), config) as engine:
        assert engine.route == "paged" and engine.max_model_len == 255
        prompts = [[3 + (7 * i + j) % 150 for i in range(150)] for j in range(2)]
        done = engine.generate(prompts, SamplingParams(max_new_tokens=2, ignore_eos=True))
        assert engine.stats().computed >= 300
    for prompt, each in zip(prompts, done, strict=True):
        assert list(each.token_ids) == alone(loaded.model, prompt, 2)
