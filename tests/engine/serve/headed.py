"""Tiny served models with heads in folders, and what a head drafts by a forward that has nothing of the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.engine.heads.head import Head
from core.engine.inspect.attention import implementation
from core.engine.models.loading import LoadedModel, build_model, load_model
from core.engine.models.tiny import tiny_config
from tests.engine.serve.drafted import VOCAB, tiny
from tests.installed import needs_prediction_layers

CPU = torch.device("cpu")
KNOWN = 96
"""Tokens that the EAGLE-3 head knows."""


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, scale: float = 0.3) -> dict[str, Tensor]:
    """Return random weights; those with one dimension lie around 1, as weights of norms do."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale + (len(shape) == 1) for name, shape in shapes.items()}


def eagle_shapes(config: Any, version: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a checkpoint of EAGLE or EAGLE-3, as its authors save it."""
    size, wide, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    query, key = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer, given = ("layers.0", size) if version < 3 else ("midlayer", 2 * size)
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.q_proj.weight": (query, given),
        f"{layer}.self_attn.k_proj.weight": (key, given),
        f"{layer}.self_attn.v_proj.weight": (key, given),
        f"{layer}.self_attn.o_proj.weight": (size, query),
        f"{layer}.mlp.gate_proj.weight": (wide, size),
        f"{layer}.mlp.up_proj.weight": (wide, size),
        f"{layer}.mlp.down_proj.weight": (size, wide),
        f"{layer}.post_attention_layernorm.weight": (size,),
        "fc.weight": (size, (2 if version < 3 else 3) * size),
    }
    if version == 3:
        shapes |= {f"{layer}.{name}.weight": (size,) for name in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (size,), "lm_head.weight": (KNOWN, size)}
    return shapes


def save_eagle(folder: Path, config: Any, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint of one layer like those of the configuration."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    config.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle(folder: Path, served: LoadedModel, version: int = 1, seed: int = 0) -> Path:
    """Write a head of random weights for a Llama."""
    tensors = random_tensors(eagle_shapes(served.config, version), seed)
    if version == 3:
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:KNOWN].sort().values
        tensors["d2t"] = kept - torch.arange(KNOWN)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    else:
        tensors["embed_tokens.weight"] = served.model.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]
    return save_eagle(folder, served.config, tensors)


def own_drafts(head: Head, loaded: LoadedModel, attention: str, tokens: Sequence[int], count: int) -> list[int]:
    """Return what a head drafts greedily behind a text, by forwards over all of it, without any cache."""
    ids = list(tokens)
    heard: list[Tensor] = []
    handles = head.listen(loaded.model, heard.append)
    with torch.no_grad(), implementation(loaded.model, attention):
        loaded.model(input_ids=torch.tensor([ids[:-1]]), use_cache=False)
    for handle in handles:
        handle.remove()
    states = heard[0][None]
    with torch.no_grad(), implementation(head, "sdpa"):
        for _ in range(count):
            embedded = head.embedding(torch.tensor([ids[1:]]))
            hidden, following = head.compute(embedded, states, torch.arange(len(ids) - 1)[None])
            ids.append(int(head.project(hidden[:, -1:]).argmax()))
            states = torch.cat((states, following[:, -1:]), dim=1)
    return ids[len(tokens) :]


def with_own_heads(folder: Path, model_type: str, num_heads: int = 1, seed: int = 0) -> Path:
    """Write a tiny checkpoint with multi-token prediction layers, named as DeepSeek-V3's are, of random weights."""
    needs_prediction_layers()
    config = tiny_config(model_type, vocab_size=VOCAB, num_nextn_predict_layers=num_heads)
    model: Any = build_model(config, torch_device=CPU, dtype=torch.float32, seed=seed).model
    model.save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed + 1)
    count, size = config.num_hidden_layers, config.hidden_size
    last = {name: value for name, value in tensors.items() if name.startswith(f"model.layers.{count - 1}.")}
    for place in range(count, count + num_heads):
        for name, value in last.items():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            tensors[name.replace(f".{count - 1}.", f".{place}.", 1)] = value + 0.05 * noise
        own = {"enorm": (size,), "hnorm": (size,), "shared_head.norm": (size,), "eh_proj": (size, 2 * size)}
        shapes: dict[str, tuple[int, ...]] = {f"model.layers.{place}.{name}.weight": own[name] for name in own}
        tensors |= random_tensors(shapes, seed + place)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path) -> LoadedModel:
    return load_model(folder, torch_device=CPU, dtype=torch.float32)


def successor(folder: Path, *, by: str, noise: float = 0.0) -> tuple[LoadedModel, Path]:
    """Return a model after each of whose tokens the next one is the token plus 1, and a head that knows.

    Features are tokens, and layers add nothing. by: "states" reads nothing but the hidden state, which is the one of
    the token before, and "tokens" nothing but the embedding. noise: of the head's weights, beside which some drafts are
    wrong.
    """
    served = tiny(hidden_size=VOCAB, head_dim=40, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1)
    model: Any = served.model
    one, step = torch.eye(VOCAB), torch.eye(VOCAB).roll(1, 0)  # column t of `step` is token t + 1
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(one)
        model.lm_head.weight.copy_(step)
    shapes = eagle_shapes(served.config, 1)
    tensors = random_tensors(shapes, 0, scale=noise)
    joins = {"states": (0 * one, step), "tokens": (VOCAB**0.5 * one, 0 * one)}  # as large as what the norm gives
    tensors["fc.weight"] = tensors["fc.weight"] + torch.cat(joins[by], dim=1)
    return served, save_eagle(folder, served.config, tensors)
