"""A model of transformers on its static cache, whose step a peer compiles in its own way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from core.common.peers import PeerRunner, PeerWork

Step = Callable[[Tensor], Tensor]
"""Takes token ids (B, T), moves the cache on, and returns the next tokens (B, 1)."""
_FILL_TOKENS = 8192
_WARM_UPS = 3


def load(work: PeerWork) -> Any:
    """Return the model in evaluation mode."""
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(work.threads)
    # Before 4.56 it took a dtype by this name only, and with `dtype` read the weights in fp32.
    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    given: dict[str, Any] = {name: getattr(torch, work.dtype)}
    model = AutoModelForCausalLM.from_pretrained(work.folder, local_files_only=True, **given)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def static_runner(work: PeerWork, make: Callable[[Any, Any, Tensor], Step]) -> PeerRunner:
    """Fill a cache by the eager model, compile the step by `make(model, cache, example ids)`, and warm it up."""
    from transformers import StaticCache

    model = load(work)
    prompts = torch.tensor(work.prompts)
    cache = StaticCache(config=model.config, max_cache_len=-(-work.limit // 16) * 16)
    eager = eager_step(model, cache)
    if work.phase == "prefill":
        return _prefill(make, model, cache, prompts)
    for part in prompts.split(max(1, _FILL_TOKENS // len(prompts)), dim=1):
        first = eager(part)
    step = make(model, cache, first)
    for _ in range(_WARM_UPS):
        rewind(cache, prompts.shape[1])
        ids = step(first).clone()
    tokens = torch.cat([first, ids], 1).tolist()

    def run(count: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in work.prompts]
        with torch.no_grad():  # as in the warm-up: Dynamo guards on it
            for _ in range(count):
                ids.copy_(step(ids))
                for row, token in zip(found, ids[:, 0].tolist(), strict=True):
                    row.append(token)
        return found

    return PeerRunner(tokens=tokens, run=run, keeps=(model, cache))


def _prefill(make: Callable[[Any, Any, Tensor], Step], model: Any, cache: Any, prompts: Tensor) -> PeerRunner:
    eager_step(model, cache)(prompts[:, :1])  # the layers allocate here
    rewind(cache, 0)
    step = make(model, cache, prompts)

    def run(count: int) -> list[list[int]]:
        found: list[int] = []
        with torch.no_grad():
            for _ in range(count):
                rewind(cache, 0)
                found += step(prompts)[:, 0].tolist()
        return [found]

    tokens = [run(_WARM_UPS)[0][-1:]]
    return PeerRunner(tokens=tokens, run=run, keeps=(model, cache))


def eager_step(model: Any, cache: Any) -> Step:
    """Return transformers' own forward and the argmax of its last logits."""

    @torch.no_grad()
    def step(ids: Tensor) -> Tensor:
        return next_tokens(model, cache, ids)

    return step


def next_tokens(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Return the tokens (B, 1) that follow ids (B, T), which join the cache."""
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, logits_to_keep=1)
    tokens: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
    return tokens


def rewind(cache: Any, position: int) -> None:
    """Set how many tokens the cache holds; what lies behind is hidden by the mask and written anew."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)


def cache_tensors(cache: Any) -> list[Tensor]:
    """Return keys (B, heads, length, size) and values of each layer in turn, which steps write into."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


class ExportableStep(torch.nn.Module):
    """One step as a function of tensors alone: (ids (B, T), tokens held (), keys and values) -> (B, 1)."""

    def __init__(self, model: Any, cache: Any) -> None:
        super().__init__()
        self.model = model
        self._cache = cache

    def forward(self, ids: Tensor, held: Tensor, tensors: list[Tensor]) -> Tensor:
        """Return the next tokens; writes into `tensors`."""
        return next_tokens(self.model, self._bound(held, tensors), ids)

    def _bound(self, held: Tensor, tensors: list[Tensor]) -> Any:
        """Return a cache over the given memory, whose objects nobody else has: a trace may change them."""
        cache = copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in self._cache.layers]
        for layer, keys, values in zip(cache.layers, tensors[::2], tensors[1::2], strict=True):
            layer.keys, layer.values, layer.cumulative_length = keys, values, held.clone()
        return cache
