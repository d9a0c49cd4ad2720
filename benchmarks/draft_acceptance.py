"""How many drafts are accepted: by the numbers of the sequence, as the engine does, and by rejection sampling.

The embedded model samples texts. At each of their tokens a draft model's distribution q is compared with the model's
own p: the share of random numbers at which both choose the same token, and the sum of min(p, q), which rejection
sampling accepts. Everything is computed by plain forwards on the processor; docs/serving.md has the figures.

    python benchmarks/draft_acceptance.py
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from core.common.ops.sampling import argmax, sample
from core.engine.models.assets import embedded_model
from core.engine.models.loading import load_model

PROMPT = "Return a list of the names in the module. If the argument is a string, return it."
NUM_TEXTS, NUM_TOKENS = 8, 60
NUM_NUMBERS = 50
"""Random numbers for each token of a text."""


def main() -> None:
    """Print one line for each temperature and draft model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    generator = torch.Generator().manual_seed(parser.parse_args().seed)
    loaded = load_model(embedded_model(), torch_device=torch.device("cpu"), dtype=torch.float32)
    prompt = torch.tensor([loaded.require_tokenizer()(PROMPT)["input_ids"]])
    print(f"torch {torch.__version__}; {NUM_TEXTS} texts of {NUM_TOKENS} tokens, {NUM_NUMBERS} numbers for each")
    for temperature in (0.7, 1.0):
        texts = sampled_texts(loaded.model, prompt, temperature, generator)
        own = logits_of(loaded.model, texts)
        for name, draft in drafts_of(loaded.model, generator):
            shares = accepted(own, logits_of(draft, texts), temperature, generator)
            told = ", ".join(f"{kind} {share:.2f}" for kind, share in shares.items())
            print(f"temperature {temperature}, {name}: {told}")


def drafts_of(model: Any, generator: torch.Generator) -> Iterator[tuple[str, Any]]:
    """Yield draft models with their names: the first layers alone, and weights with noise."""
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:-1]
    yield f"{len(short.model.layers)} of {len(model.model.layers)} layers", short
    for noise in (0.05, 0.02):
        noisy = copy.deepcopy(model)
        for parameter in noisy.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        yield f"noise of {noise:.0%}", noisy


@torch.no_grad()
def sampled_texts(model: Any, prompt: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return token ids (texts, prompt + `NUM_TOKENS`) that the model samples."""
    texts = prompt.repeat(NUM_TEXTS, 1)
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=texts, use_cache=False).logits[:, -1]
        chosen = sample(logits, params_of(len(texts), temperature, generator))
        texts = torch.cat([texts, chosen[:, None]], dim=1)
    return texts


@torch.no_grad()
def logits_of(model: Any, texts: Tensor) -> Tensor:
    """Return the logits (texts * `NUM_TOKENS`, vocabulary) that sampled tokens are chosen from."""
    logits: Tensor = model(input_ids=texts, use_cache=False).logits[:, -NUM_TOKENS - 1 : -1]
    return logits.flatten(0, 1)


def accepted(own: Tensor, drafted: Tensor, temperature: float, generator: torch.Generator) -> dict[str, float]:
    """Return the shares of accepted first drafts: greedy, sampled as the engine does, sampled with rejection."""
    same = 0.0
    for _ in range(NUM_NUMBERS):
        params = params_of(len(own), temperature, generator)
        same += (sample(own, params) == sample(drafted, params)).float().mean().item() / NUM_NUMBERS
    least = torch.minimum((own / temperature).softmax(-1), (drafted / temperature).softmax(-1))
    greedy = (argmax(own) == argmax(drafted)).float().mean().item()
    return {"greedy": greedy, "sampled": same, "by rejection": least.sum(-1).mean().item()}


def params_of(rows: int, temperature: float, generator: torch.Generator) -> Tensor:
    """Return a row of sampling parameters for each of `rows` rows: no top-k, no top-p, a fresh number."""
    numbers = torch.rand(rows, generator=generator)
    return torch.stack([torch.full_like(numbers, temperature), torch.zeros(rows), torch.ones(rows), numbers], dim=1)


if __name__ == "__main__":
    main()
