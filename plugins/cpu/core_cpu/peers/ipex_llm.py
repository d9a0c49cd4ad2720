"""Intel's extension for PyTorch: the graph that `ipex.llm.optimize` has torch.jit trace and freeze.

The extension's own `generate` calls that graph too; without `generate` around it a step has less to do in Python.
Its last release is for torch 2.8, which `core`'s engine can't run under: an environment of its own, named by
`--peer-python`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.common.peers import PeerRunner, PeerWork
from core.errors import ModelError
from core_cpu.peers.static import load

_WARM_UPS = 3
"""Prompts, and steps after each: torch.jit watches the first calls, and makes its code then."""
_PLACES = 2048
"""Rows of the table of beams before the first call, as the extension's `generate` has them; the graph makes its own."""


def traced(work: PeerWork) -> PeerRunner:
    """Optimise, trace and freeze the model, and compute prompts and first steps until torch.jit has made its code.

    Raises `ModelError` for a model whose architecture the extension has no graph of.
    """
    model = load(work)
    graph = _graph(model, work)
    if work.phase == "prefill":

        def prefill(count: int) -> list[list[int]]:
            return [[_Sequences(graph, model, work).tokens[0][0] for _ in range(count)]]

        return PeerRunner(tokens=[prefill(_WARM_UPS)[0][-1:]], run=prefill, keeps=model)
    for _ in range(_WARM_UPS):
        sequences = _Sequences(graph, model, work)
        sequences.steps(_WARM_UPS)
    sequences = _Sequences(graph, model, work)
    tokens = [first + new for first, new in zip(sequences.tokens, sequences.steps(1), strict=True)]
    return PeerRunner(tokens=tokens, run=sequences.steps, keeps=model)


def _graph(model: Any, work: PeerWork) -> Callable[..., Any]:
    """Return the graph that `ipex.llm.optimize` leaves on a model; it takes and returns what `_Sequences` says."""
    import intel_extension_for_pytorch as ipex

    model.config.text_max_length = work.limit  # of the cache that the graph makes, else 2,048
    model.config.lm_head_generation = True  # logits of the last place of a prompt only, as `core` has them
    model = ipex.llm.optimize(model, dtype=getattr(torch, work.dtype), inplace=True, deployment_mode=True)
    if not hasattr(model, "trace_graph"):
        raise ModelError(
            "ipex.llm.optimize",
            found=f"it has no graph of {', '.join(model.config.architectures or ())}, and leaves the model as it was",
            remedy="leave ipex.llm out of --subjects",
        )
    graph: Callable[..., Any] = model.trace_graph.optimized_model
    return graph


class _Sequences:
    """Sequences, of which the graph has computed the prompts, and what it holds of them."""

    def __init__(self, graph: Callable[..., Any], model: Any, work: PeerWork) -> None:
        self._graph = graph
        prompts = torch.tensor(work.prompts)
        count, self._held = len(prompts), 0
        self._mask = torch.ones((count, work.limit), dtype=torch.long)
        self._places = torch.arange(work.limit).expand(count, -1).contiguous()
        # For each layer: how many tokens it holds (the third size), keys, values, and which beam each comes from. The
        # graph puts its own in their place at the first call; another first size makes each step last seconds.
        nothing, empty = torch.zeros((1, 0, 0, 1), dtype=torch.long), torch.zeros((1, 1, 1, 1), dtype=model.dtype)
        layer = (nothing, empty, empty, torch.zeros((_PLACES, count), dtype=torch.long))
        self._cache: Any = (layer,) * model.config.num_hidden_layers
        with torch.inference_mode():
            self._ids = self._next(prompts)
        #: The first token of each sequence.
        self.tokens: list[list[int]] = self._ids.tolist()

    def steps(self, count: int) -> list[list[int]]:
        """Take `count` steps; return each sequence's tokens."""
        found: list[list[int]] = [[] for _ in self.tokens]
        with torch.inference_mode():
            for _ in range(count):
                self._ids = self._next(self._ids)
                for row, token in zip(found, self._ids[:, 0].tolist(), strict=True):
                    row.append(token)
        return found

    def _next(self, ids: Tensor) -> Tensor:
        """Return the tokens (B, 1) that follow ids (B, T)."""
        begin, self._held = self._held, self._held + ids.shape[1]
        logits, self._cache, *_ = self._graph(
            input_ids=ids,
            attention_mask=self._mask[:, : self._held],
            position_ids=self._places[:, begin : self._held],
            past_key_values=self._cache,
        )
        tokens: Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return tokens
