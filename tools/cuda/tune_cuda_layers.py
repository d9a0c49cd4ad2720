"""Choose configurations of the CUDA plugin's linear layers where they run: in a decoder layer, between other kernels.

    python tools/cuda/tune_cuda_layers.py [--presets llama-1b,llama-8b] [--batch 1,8,64] [--keep 5]

A kernel that starts while the one before it still runs is not as fast in a layer as among its like. So the best few
configurations that `tune_cuda.py` finds for each layer's products are tried in whole decoder layers of decode, on
weights that the L2 cache cannot hold, one product after the other until none gets faster by another. Writes the file of
`tune_cuda.py`, or --out: the configuration that won, with the microseconds of the layer with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from cuda_calls import paged, randn
from cuda_problems import Linear
from cuda_timing import require_gpu, time_us
from torch import Tensor
from tune_cuda import compile_all, keep, ranked

from core.bench.presets import PRESETS

LAYERS = 4
CONTEXT = 1024
SWEEPS = 2
ROUNDS = 24
LEAST_GAIN = 0.998
"""Times of a layer differ by that much from one graph to the next."""


class Layer:
    """A decoder layer of a preset, dense, as the passes leave it: norms, four products, attention; and its data."""

    def __init__(self, preset: str, batch: int) -> None:
        fields: dict[str, Any] = dict(PRESETS[preset].fields)
        hidden, head, wide = fields["hidden_size"], fields["head_dim"], fields["intermediate_size"]
        self.heads, self.kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
        self.head, self.batch = head, batch
        self.products = {
            "qkv": Linear(batch, (self.heads + 2 * self.kv_heads) * head, hidden),
            "o": Linear(batch, hidden, self.heads * head),
            "gate_up": Linear(batch, wide, hidden, gated=True),
            "down": Linear(batch, hidden, wide),
        }
        self._norm = (randn(hidden), 1e-6)
        self._first = (randn(batch, hidden), randn(batch, hidden))
        self._last = self._first
        self._weights = [{name: p.make("cuda")[1] for name, p in self.products.items()} for _ in range(LAYERS)]
        shape = (self.heads, self.kv_heads, head)
        self._caches = [paged(batch, 1, CONTEXT, shape) for _ in range(LAYERS)]

    def time(self, configs: Mapping[str, Any]) -> float:
        """Return the median microseconds of a layer with these configurations; None is the library."""
        return time_us(lambda index: self._run(index, configs), range(LAYERS), rounds=ROUNDS)

    def _run(self, index: int, configs: Mapping[str, Any]) -> None:
        from core_cuda.ops.attention import decode as decode_attention
        from core_cuda.ops.norm import norms as norm

        def product(name: str, x: Tensor) -> Tensor:
            problem, data = self.products[name], (x, self._weights[index][name])
            return problem.library(data) if configs[name] is None else problem.run(data, configs[name])

        x, residual = self._last if index else self._first
        normed, residual = norm.add_rms_norm(x, residual, *self._norm)
        heads = product("qkv", normed).view(self.batch, -1, self.head)
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        query, key, value = heads.split(sizes, dim=1)
        call = {**self._caches[index], "query": query, "key": key, "value": value}
        attended = decode_attention.decode(**call)
        normed, residual = norm.add_rms_norm(product("o", attended.flatten(1)), residual, *self._norm)
        self._last = product("down", product("gate_up", normed)), residual


def descend(layer: Layer, tried: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], float, float]:
    """Return the configurations of the fastest layer found, its microseconds, and those with the first of each."""
    chosen = {name: configs[0] for name, configs in tried.items()}
    first = best = layer.time(chosen)
    for _ in range(SWEEPS):
        before = best
        for name, configs in tried.items():
            for config in configs:
                if config != chosen[name]:
                    taken = layer.time({**chosen, name: config})
                    if taken < best * LEAST_GAIN:
                        best, chosen = taken, {**chosen, name: config}
        if best == before:
            break
    return chosen, best, first


def main(
    presets: str = typer.Option("llama-1b,llama-8b,qwen3-8b", help="Dense shapes, by name."),
    batch: str = typer.Option("1,8,64", help="Sequences of decode."),
    most: int = typer.Option(5, "--keep", help="Configurations tried in the layer, of each product; and the library."),
    out: Path | None = typer.Option(None, help="File to write; default: the plugin's own."),
) -> None:
    """Tune linear layers in decoder layers on the current GPU."""
    require_gpu()
    from core_cuda import tuned

    product = torch.cuda.get_device_name()
    path = out or Path(tuned.__file__).parent / tuned.file_name(product)
    for preset in presets.split(","):
        layers = [Layer(preset, int(count)) for count in batch.split(",")]
        compile_all((problem for layer in layers for problem in layer.products.values()), os.cpu_count() or 1)
        for layer in layers:
            tried = {}
            for name, problem in layer.products.items():
                best = [config for _, config in ranked(problem)[0][:most]]
                tried[name] = best if None in best else [*best, None]
            chosen, taken, first = descend(layer, tried)
            print(f"{preset} batch {layer.batch}: {first:.1f} us a layer, then {taken:.1f} us", flush=True)
            for name, problem in layer.products.items():
                config = chosen[name]
                entry = {"shape": dict(problem.shape), "config": None if config is None else asdict(config)}
                entry |= {"layer_us": round(taken, 2), "layer": preset}
                print(json.dumps({"product": name, **entry}), flush=True)
                keep(path, {"device": product}, problem.op, entry)


if __name__ == "__main__":
    typer.run(main)
