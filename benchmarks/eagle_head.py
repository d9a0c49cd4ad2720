"""How many drafts of a trained EAGLE head are accepted: one is trained for the embedded model, saved, and served.

The embedded model samples texts; a head of one layer learns its hidden states and its choices on them, as Li et al.,
EAGLE (2024), section 4.2, has it. Then the engine drafts by the saved folder, and beside it by what the text said
before, on texts from other beginnings. Everything runs on the processor; docs/serving.md has the figures.

    python benchmarks/eagle_head.py --out FOLDER
    python benchmarks/eagle_head.py --head FOLDER
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss
from transformers import AutoModel

import core
from core.engine.heads.eagle import Eagle
from core.engine.models.assets import embedded_model
from core.engine.models.loading import LoadedModel, load_model

NUM_TEXTS, NUM_TOKENS, BEGINNING = 512, 96, 2
HELD_OUT = 32
BATCH, NUM_STEPS, RATE = 16, 800, 1e-3
EAGER = core.CompileOptions(mode="off")
"""What is accepted does not depend on how it is compiled."""
CHOICES = 0.1
"""Weight of the choices beside the hidden states."""


def main() -> None:
    """Train, save, and print one line for each way to draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the head is saved; default: a folder that is removed again")
    parser.add_argument("--head", type=Path, help="a saved one, which is not trained again")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(arguments.seed)
    loaded = load_model(embedded_model(), torch_device=torch.device("cpu"), dtype=torch.float32)
    beginnings = torch.randint(1, loaded.vocab_size, (NUM_TEXTS + HELD_OUT, BEGINNING), generator=generator)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.head
        if folder is None:
            texts = sampled_texts(loaded, beginnings[:NUM_TEXTS].tolist())
            torch.manual_seed(arguments.seed)
            head = new_head(loaded)
            loss = train(head, loaded.model, texts, generator)
            folder = save(head, arguments.out or Path(scratch))
            print(f"{NUM_TEXTS} texts of {NUM_TOKENS} tokens, {NUM_STEPS} steps, loss {loss:.3f}", flush=True)
        print(f"torch {torch.__version__}; {HELD_OUT} other texts of {NUM_TOKENS} tokens", flush=True)
        held_out = beginnings[NUM_TEXTS:].tolist()
        for temperature in (0.0, 0.7):
            for count in (1, 3):
                for name, draft in (("head", folder), ("ngram", None)):
                    told = accepted(loaded, held_out, draft, count, temperature)
                    print(f"temperature {temperature}, {count} drafts at most by {name}: {told}", flush=True)


def sampled_texts(loaded: LoadedModel, prompts: list[list[int]]) -> Tensor:
    """Return token ids (texts, `NUM_TOKENS`) that the model samples behind the prompts."""
    config = core.EngineConfig(max_num_seqs=32, max_model_len=NUM_TOKENS, options=EAGER)
    params = [
        core.SamplingParams(max_new_tokens=NUM_TOKENS - BEGINNING, temperature=0.7, seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    with core.Engine(loaded, core.select_device("cpu"), config) as engine:
        done = engine.generate(prompts, params)
    return torch.tensor([[*prompt, *each.token_ids] for prompt, each in zip(prompts, done, strict=True)])


def new_head(loaded: LoadedModel) -> Eagle:
    """Return a head of random weights, with one layer like those of the model."""
    config, model = copy.deepcopy(loaded.config), loaded.model
    config.num_hidden_layers = 1
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    return Eagle(AutoModel.from_config(config), embedding, lm_head, bias=False)


def train(head: Eagle, model: Any, texts: Tensor, generator: torch.Generator) -> float:
    """Fit the head's own weights to the model's hidden states and choices; return the loss of the last tenth."""
    own = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=NUM_STEPS)
    losses = []
    for _ in range(NUM_STEPS):
        ids = texts[torch.randint(len(texts), (BATCH,), generator=generator)]
        with torch.no_grad():
            states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            choices = model.lm_head(states[:, 1:]).softmax(-1)
            embedded = head.embedding(ids[:, 1:])
        positions = torch.arange(ids.shape[1] - 1)[None]
        out, _ = head.compute(embedded, states[:, :-1], positions)
        chosen = cross_entropy(head.project(out).flatten(0, 1), choices.flatten(0, 1))
        loss = smooth_l1_loss(out, states[:, 1:]) + CHOICES * chosen
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-NUM_STEPS // 10 :]
    return sum(last) / len(last)


def save(head: Eagle, folder: Path) -> Path:
    """Write the head's own weights under the names of EAGLE's checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    head.config.save_pretrained(folder)
    own = {name: value for name, value in head.named_parameters() if value.requires_grad}
    tensors = {name.removeprefix("decoder."): value.detach().contiguous() for name, value in own.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def accepted(loaded: LoadedModel, prompts: list[list[int]], draft: Path | None, count: int, temperature: float) -> str:
    """Return in words what the engine accepts of drafts behind these prompts, and what a step gives."""
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": NUM_TOKENS, "speculative": count}
    config = core.EngineConfig(**sizes, draft_model=draft, options=EAGER)
    length = NUM_TOKENS - BEGINNING
    params = core.SamplingParams(max_new_tokens=length, temperature=temperature, seed=1, ignore_eos=True)
    with core.Engine(loaded, core.select_device("cpu"), config) as engine:
        engine.generate(prompts, params)
        stats = engine.stats()
    drafted, right = stats.drafted.total(), stats.accepted.total()
    tokens = length * len(prompts)
    return f"{right / drafted:.2f} of {drafted} accepted, {tokens / (tokens - right):.2f} tokens a step and sequence"


if __name__ == "__main__":
    main()
