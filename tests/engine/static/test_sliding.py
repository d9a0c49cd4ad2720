"""transformers' static caches with a window: compiled decode steps give the model's tokens past the window's edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import core
from core.device import Device
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from tests.recording import acme
from tests.support import cpu

WINDOW, PROMPT, STEPS = 8, 5, 8
TYPES = ("mistral", "gemma2", "mixtral", "gemma3_text", "gemma4_text", "gpt_oss", "cohere2", "olmo3", "exaone4", "phi3")
INPUTS = {name: core.InputSpec((1, 1), torch.int64) for name in ("input_ids", "position_ids")}
Step = Callable[..., Tensor]


class Decode:
    """A tiny model's decode step on a `StaticCache` of its own, which holds a prompt."""

    def __init__(self, model_type: str, **changes: Any) -> None:
        config = tiny_config(model_type, sliding_window=WINDOW, **changes)
        self.model: Any = build_model(config, torch_device=torch.device("cpu"), dtype=torch.float32).model
        self.cache = self._filled()
        assert "StaticSlidingWindowLayer" in {type(layer).__name__ for layer in self.cache.layers}

    def _filled(self) -> Any:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=32)
        with torch.no_grad():
            self.model(input_ids=torch.arange(3, 3 + PROMPT)[None], past_key_values=cache)
        return cache

    def step(self, cache: Any) -> Step:
        model = self.model

        def decode(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache).logits
            return logits

        return decode

    def reset(self) -> None:
        """Bring the cache back to where it holds the prompt, in place."""
        for layer, filled in zip(self.cache.layers, self._filled().layers, strict=True):
            for name, value in vars(filled).items():
                if isinstance(value, Tensor):
                    getattr(layer, name).copy_(value)
                elif isinstance(value, int):
                    setattr(layer, name, value)

    @contextmanager
    def program(self, device: Device, **options: Any) -> Iterator[core.Program]:
        options["options"] = core.CompileOptions(reset=self.reset)
        with core.compile(self.step(self.cache), device, inputs=INPUTS, lowering="inline", **options) as program:
            yield program

    def compare(self, program: core.Program) -> None:
        """Assert that eager decoding and the program choose the same tokens, over the edge of the window."""
        eager, token = self.step(self._filled()), torch.tensor([[5]])
        with torch.no_grad():
            for index in range(STEPS):
                inputs = {"input_ids": token, "position_ids": torch.tensor([[PROMPT + index]])}
                expected = eager(**inputs)
                torch.testing.assert_close(program(**inputs), expected, rtol=1e-4, atol=1e-5)
                token = expected[:, -1].argmax(-1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_two_graphs_decode_over_the_edge_of_the_window(model_type: str) -> None:
    decodes_over_the_edge(Decode(model_type))


@pytest.mark.slow
def test_two_graphs_decode_over_the_edge_of_the_window_of_one_layer() -> None:
    decodes_over_the_edge(Decode("mistral", num_hidden_layers=1))


def decodes_over_the_edge(decode: Decode) -> None:
    with decode.program(cpu(), strict=True) as program:
        report = program.report()
        assert report.modes == {"main": "compile"} and report.num_traces == 2 and not report.notes
        decode.compare(program)
        decode.reset()
        decode.compare(program)
        assert not program.report().fallbacks


def test_on_a_device_with_graphs_the_step_runs_eagerly_and_the_report_says_why() -> None:
    decode = Decode("mistral", num_hidden_layers=1)
    with decode.program(acme()) as program:
        assert program.report().modes == {"main": "off"}
        assert "cumulative_length_int (attribute of a StaticSlidingWindowLayer)" in program.report().notes[-1]
        decode.compare(program)
