"""The short forms of the engine: a device by its name, a text for a list of one, a string to stop at."""

from __future__ import annotations

import torch

from core import CompileOptions, Engine, EngineConfig, SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.models.loading import load_model

CONFIG = EngineConfig(max_num_seqs=1, max_model_len=32, options=CompileOptions(mode="off"))


def test_an_engine_takes_names_texts_and_a_stop_string() -> None:
    with Engine(load_model(embedded_model(), torch_device=torch.device("cpu")), "cpu", CONFIG) as engine:
        assert engine.device.name == "cpu"
        (whole,) = engine.generate("This", SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert (
            whole.token_ids == engine.generate(["This"], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids
        )
        stop = whole.text[1:3]
        (ended,) = engine.generate("This", SamplingParams(max_new_tokens=4, stop=stop))
        assert stop not in ended.text and whole.text.startswith(ended.text)
