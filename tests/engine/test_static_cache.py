"""core/engine/static_cache: prefill and decode on a static cache, ready to be traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.tracing import trace
from core.engine.loading import build_model
from core.engine.static_cache import static_phases
from core.engine.tiny import tiny_config


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_prefill_and_decode_are_what_the_model_computes_without_a_cache(name: str) -> None:
    model: Any = build_model(tiny_config(name), torch_device=torch.device("cpu"), dtype=torch.float32).model
    prefill, decode = static_phases(model, batch_size=2, num_tokens=5)
    ids = torch.cat([prefill.inputs["input_ids"], decode.inputs["input_ids"]], 1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(prefill.function(**prefill.inputs), expected[:, :-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decode.function(**decode.inputs), expected[:, -1:], rtol=1e-4, atol=1e-5)


def test_both_phases_trace_whole_and_prefill_at_any_length() -> None:
    model: Any = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32).model
    prefill, decode = static_phases(model)
    graph = trace(prefill.function, prefill.inputs, dynamic=prefill.dynamic)
    assert {slot.name for slot in graph.symbols.values()} >= {"input_ids"}
    assert not trace(decode.function, decode.inputs, dynamic=decode.dynamic).symbols
