"""Reads a head: the layers that the served model's checkpoint brings, or an EAGLE checkpoint in a folder of its own."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.engine.config import OWN_HEADS
from core.engine.heads.eagle import Eagle, Eagle3, layers_read
from core.engine.heads.head import Head
from core.engine.heads.prediction import load_prediction
from core.engine.models.bounds import check_finite
from core.engine.models.checkpoint import Checkpoint, asked_for, inspect_checkpoint
from core.engine.models.hf import driven, import_transformers
from core.engine.models.loading import LoadedModel, loaded_model
from core.engine.models.reading import described, few, read_config
from core.errors import ModelError
from core.paths import local_path

_IGNORED = re.compile(r"t2d|.*rotary_emb\.inv_freq")
"""The reverse of `d2t`, and what follows from the configuration."""
_JOINS = "fc.weight"
_REMEDY = "take a head that was trained for the served model"


def load_head(draft: str | Path, loaded: LoadedModel) -> LoadedModel | None:
    """Return the head that `OWN_HEADS` or a folder names, on the served model's device and in its dtype.

    None for a folder that holds a model. Raises `ModelError` for one that can't be read or does not fit `loaded`.
    """
    start_s = time.perf_counter()
    path = loaded.path
    warnings: list[str] = []
    head: Head | None = None
    if str(draft) == OWN_HEADS:
        head, warnings = load_prediction(loaded)
    else:
        checkpoint = inspect_checkpoint(local_path(f"draft model {str(draft)!r}", draft))
        path = checkpoint.path
        tensors = _Tensors(checkpoint)
        if _JOINS in tensors.names:
            head = _read_eagle(checkpoint, tensors, loaded)
    if head is None:
        return None
    took_s = time.perf_counter() - start_s
    found = loaded_model(head, dtype=loaded.dtype, load_time_s=took_s, logged=(), warnings=warnings, path=path)
    shared = {id(each) for each in loaded.model.parameters()}
    return replace(found, num_parameters=sum(p.numel() for p in head.parameters() if id(p) not in shared))


class _Tensors:
    """The tensors of a checkpoint, under the names that EAGLE's own code gives them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from safetensors import safe_open

        self._open = safe_open
        self.names: dict[str, tuple[Path, str]] = {}
        for file in checkpoint.weight_files:
            with safe_open(file, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118  # it is no mapping
                    plain = name.removeprefix("model.")
                    self.names[re.sub(r"^midlayer\.", "layers.0.", plain)] = (file, name)

    def read(self) -> dict[str, Tensor]:
        """Return them all, on the host."""
        found = {}
        for plain, (file, name) in self.names.items():
            with self._open(file, framework="pt") as held:
                found[plain] = held.get_tensor(name)
        return found


def _read_eagle(checkpoint: Checkpoint, tensors: _Tensors, loaded: LoadedModel) -> Head:
    asked, model = asked_for(checkpoint.path), loaded.model
    with driven(None):
        config = read_config(asked, checkpoint.path)
        values = {name: value for name, value in tensors.read().items() if not _IGNORED.fullmatch(name)}
        problem = _unlike(config, values, loaded)
        if problem:
            raise ModelError(asked, found=problem, remedy=_REMEDY)
        try:
            head = _build(config, values, model, loaded)
        except Exception as error:  # a model of any architecture is built in there
            found = f"a head can't be made of its config.json: {described(error)}"
            raise ModelError(asked, found=found, remedy="take a head whose layers are those of a Llama") from error
    _fill(asked, head, values)
    check_finite(asked, head)
    return head.to(next(model.parameters()).device)


def _unlike(config: Any, values: dict[str, Tensor], loaded: LoadedModel) -> str:
    """Return why a head does not fit the served model; "" where it does."""
    size = loaded.config.get_text_config().hidden_size
    if config.hidden_size != size:
        return f"its hidden states have {config.hidden_size} features, those of the served model {size}"
    if config.vocab_size != loaded.vocab_size and "embed_tokens.weight" not in values:
        return f"it has {config.vocab_size} tokens, the served model {loaded.vocab_size}"
    embedding = values.get("embed_tokens.weight")
    if embedding is not None and len(embedding) != loaded.vocab_size:
        return f"it has {len(embedding)} tokens, the served model {loaded.vocab_size}"
    return ""


def _build(config: Any, values: dict[str, Tensor], model: Any, loaded: LoadedModel) -> Head:
    """Return a head of random weights that has a place for these."""
    small, dtype = copy.deepcopy(config), loaded.dtype
    small.vocab_size, small.pad_token_id = 1, None  # of the embedding, which is replaced
    with torch.random.fork_rng(devices=[]):
        decoder = import_transformers().AutoModel.from_config(small, dtype=dtype)
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    size, decoder.config.vocab_size = config.hidden_size, loaded.vocab_size
    if (given := values.get("embed_tokens.weight")) is not None:
        ours = embedding.weight
        if torch.equal(given.to(ours.device, ours.dtype), ours):
            del values["embed_tokens.weight"]  # as most heads have it: one copy is enough
        else:
            embedding = nn.Embedding(given.shape[0], given.shape[1], dtype=dtype)
    if (given := values.get("lm_head.weight")) is not None:
        lm_head = nn.Linear(size, len(given), bias=False, dtype=dtype)
    joined = values[_JOINS].shape[-1] // size
    if joined == 2:
        return Eagle(decoder, embedding, lm_head, bias="fc.bias" in values)
    layers, count = layers_read(config, len(model.get_decoder().layers)), len(model.get_decoder().layers)
    if len(layers) != joined or not all(0 <= index < count for index in layers):
        raise ValueError(f"it reads {joined} hidden states, and layers {list(layers)} of the served model's {count}")
    known = decoder.config.draft_vocab_size = lm_head.weight.shape[0]
    if known != loaded.vocab_size and "d2t" not in values:
        raise ValueError(f"it knows {known} tokens of {loaded.vocab_size}, and no 'd2t' says which")
    return Eagle3(decoder, embedding, lm_head, layers=layers, vocab_size=loaded.vocab_size)


@torch.no_grad()
def _fill(asked: str, head: Head, values: dict[str, Tensor]) -> None:
    """Copy the values into a head; raise `ModelError` for names and shapes that are not its own."""
    shared = {id(each) for module in (head.embedding, head.get_submodule("lm_head")) for each in module.parameters()}
    own = {"embed_tokens.weight": "embedding.weight"}
    places = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    names = {name: own.get(name, _place(name, head)) for name in values}
    wanted = {name for name, value in head.named_parameters() if id(value) not in shared}
    wanted |= {name for name in ("embedding.weight", "lm_head.weight") if name in names.values()}
    missing = sorted(wanted - set(names.values()))
    extra = sorted(name for name, place in names.items() if place not in places)
    wrong = [
        f"{name}: {tuple(values[name].shape)} in the file, {tuple(places[place].shape)} in the head"
        for name, place in names.items()
        if place in places and values[name].shape != places[place].shape
    ]
    for problem, which in (("are missing", missing), ("have no place in it", extra), ("have another shape", wrong)):
        if which:
            raise ModelError(asked, found=f"{len(which)} weights of the head {problem}: {few(which)}", remedy=_REMEDY)
    for name, place in names.items():
        places[place].copy_(values[name])


def _place(name: str, head: Head) -> str:
    """Return where a head keeps what its checkpoint calls by this name."""
    if isinstance(head, Eagle3):
        return re.sub(r"^layers\.0\.(hidden_norm\.)?", lambda found: found[1] or "layer.", name)
    return f"decoder.{name}" if name.startswith("layers.") else name
