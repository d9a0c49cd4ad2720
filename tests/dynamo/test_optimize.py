"""`core.optimize`: which modules of a pipeline are compiled in place, and that its results stay."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core.errors import UnknownDeviceError, UsageError


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


class Coder(nn.Module):
    """An autoencoder as diffusers has it: its parts are called by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)

    def encode(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x)
        return result

    def decode(self, z: Tensor) -> Tensor:
        result: Tensor = self.decoder(z)
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class DiffusionPipeline:
    """The shape of a diffusers pipeline: modules and others in `components`."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {
            "unet": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).eval(),
            "vae": Coder().eval(),
            "scheduler": SimpleNamespace(step=0.1),
            "safety_checker": None,
        }

    def __call__(self, x: Tensor) -> Tensor:
        parts = self.components
        z = parts["vae"].encode(x)
        for _ in range(3):
            z = z - parts["scheduler"].step * parts["unet"](z)
        result: Tensor = parts["vae"].decode(z)
        return result


class Inner(nn.Module):
    """The first part of a sentence encoder, which calls its model past `__call__`."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_model = nn.Linear(4, 4)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "tokens": self.auto_model.forward(features["x"])}


class Pooling(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "pooled": features["tokens"].mean(0)}


class SentenceEncoder(nn.Sequential):
    """The shape of a SentenceTransformer: `encode` calls `forward`, past `__call__`."""

    def encode(self, x: Tensor) -> Tensor:
        return self.forward({"x": x})["pooled"]


def calls(graphs: Iterator[Any] | Any) -> list[int]:
    return [graph.calls for graph in graphs]


@torch.no_grad()
def test_a_model_is_compiled_in_place() -> None:
    model = nn.Linear(4, 4).eval()
    assert core.optimize(model, lowering="inline", passes=()) is model
    model(torch.ones(2, 4))
    assert core.backend_report().calls == 1


@torch.inference_mode()
def test_a_diffusion_pipeline() -> None:
    pipe, x = DiffusionPipeline(), torch.randn(5, 8)
    expected = pipe(x)
    assert core.optimize(pipe, lowering="inline") is pipe
    torch.testing.assert_close(pipe(x), expected)
    assert is_compiled(pipe.components["unet"]) and is_compiled(pipe.components["vae"].decoder)
    assert sorted(calls(core.backend_report().graphs)) == [1, 1, 3]


@torch.inference_mode()
def test_a_sentence_encoder() -> None:
    model = SentenceEncoder(Inner(), Pooling()).eval()
    expected = model.encode(torch.ones(2, 4))
    core.optimize(model, lowering="inline")
    torch.testing.assert_close(model.encode(torch.ones(2, 4)), expected)
    report = core.backend_report()
    assert (report.calls, report.matched["lift_linear"]) == (2, 1)


def test_a_pipeline_without_modules_is_refused() -> None:
    with pytest.raises(UsageError, match=r"holds none in its attributes"):
        core.optimize(SimpleNamespace(model=3))


def test_a_device_is_opened_at_once() -> None:
    model = core.optimize(nn.Linear(4, 4).eval(), "cpu", lowering="inline")
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert core.backend_report().calls == 1
    with pytest.raises(UnknownDeviceError, match="no installed plugin has that name"):
        core.optimize(nn.Linear(4, 4), "nowhere")


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="did you mean 'lowering'"):
        core.optimize(nn.Linear(2, 2), lowring="inline")
    with pytest.raises(UsageError, match="not both"):
        core.optimize(nn.Linear(2, 2), mode="reduce-overhead", lowering="inline")


@pytest.mark.slow
@torch.inference_mode()
def test_a_pipeline_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=4, **sizes)).eval()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "one": 2, "two": 3}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    expected = pipe("one two one", return_tensors=True)
    core.optimize(pipe, lowering="inline")
    torch.testing.assert_close(pipe("one two one", return_tensors=True), expected)
    report = core.backend_report()
    assert (report.calls, report.matched["lift_attention"], report.graph_breaks) == (1, 1, {})


@pytest.mark.slow
@torch.inference_mode()
def test_a_pipeline_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    pipe = diffusers.DDPMPipeline(unet=model, scheduler=diffusers.DDPMScheduler())
    asked = {"num_inference_steps": 3, "output_type": "np"}
    expected = pipe(generator=torch.manual_seed(0), **asked).images
    core.optimize(pipe, lowering="inline")
    found = pipe(generator=torch.manual_seed(0), **asked).images
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), atol=1e-4, rtol=1e-4)
    assert core.backend_report().calls == 3
