"""core/engine/static/cache.py: prefill and decode on a static cache, ready to be traced."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.compilation.trace.tracing import trace
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.static.cache import static_cache, static_phases
from core.errors import TraceError


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "inkling_text"])
def test_prefill_and_decode_are_what_the_model_computes_without_a_cache(name: str) -> None:
    model: Any = build_model(tiny_config(name), torch_device=torch.device("cpu"), dtype=torch.float32).model
    prefill, decode = static_phases(model, batch_size=2, num_tokens=5)
    ids = torch.cat([prefill.inputs["input_ids"], decode.inputs["input_ids"]], 1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(prefill.function(**prefill.inputs), expected[:, :-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decode.function(**decode.inputs), expected[:, -1:], rtol=1e-4, atol=1e-5)


def test_a_length_that_was_asked_for_stays_what_it_was() -> None:
    """Inkling asks before it writes, and computes positions after that."""
    model: Any = build_model(tiny_config("inkling2_text"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    cache, ids = static_cache(model, 24), torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
        before = cache.get_seq_length()
        model(input_ids=ids[:, 3:4], past_key_values=cache, use_cache=True)
    assert (int(before), int(cache.get_seq_length()), int(cache.get_query_offset())) == (3, 4, 4)


@pytest.mark.slow
def test_a_prompt_begins_without_the_states_of_the_call_before_and_can_be_traced() -> None:
    """transformers notes in a dict of Python's that a layer has a state, which no replay of a graph would."""
    config = tiny_config("mamba2", num_hidden_layers=1)
    model: Any = build_model(config, torch_device=torch.device("cpu"), dtype=torch.float32).model
    prefill, decode = static_phases(model)
    with torch.no_grad():
        assert torch.equal(prefill.function(**prefill.inputs), prefill.function(**prefill.inputs))
    for phase in (prefill, decode):
        assert len(trace(phase.function, phase.inputs).module.graph.nodes) > 10


@pytest.mark.slow
def test_both_phases_trace_whole_and_prefill_at_any_length() -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    model: Any = build_model(config, torch_device=torch.device("cpu"), dtype=torch.float32).model
    prefill, decode = static_phases(model)
    graph = trace(prefill.function, prefill.inputs, dynamic=prefill.dynamic)
    assert {slot.name for slot in graph.symbols.values()} >= {"input_ids"}
    assert not trace(decode.function, decode.inputs, dynamic=decode.dynamic).symbols


@pytest.mark.slow
def test_a_model_that_makes_a_mask_of_unknown_length_is_given_one() -> None:
    model: Any = build_model(tiny_config("megatron-bert"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    # Not so in every version of transformers.
    with suppress(TraceError):
        trace(static_phases(model)[1].function, static_phases(model)[1].inputs)
    plain, masked = static_phases(model), static_phases(model, masked=True)
    for bare, given in zip(plain, masked, strict=True):
        with torch.no_grad():
            assert torch.equal(bare.function(**bare.inputs), given.function(**given.inputs))
        trace(given.function, given.inputs, dynamic=given.dynamic)


def test_a_mask_that_changes_a_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def hiding(input_ids: torch.Tensor, max_len: int) -> torch.Tensor:
        return torch.arange(max_len).expand(input_ids.shape[0], -1).ne(1).long()

    monkeypatch.setattr("core.engine.static.cache.full_mask", hiding)
    model: Any = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    with pytest.raises(ValueError, match="hides nothing its logits differ by"):
        static_phases(model, masked=True)
