"""Measures the kernels of a step, by layer and node, beside the bytes that each node has to move.

The finished graph is run node by node, not captured, under torch.profiler; what runs on the device (on a device without
kernels of its own: the host's ops) belongs to the node in whose time it began, since each node is waited for. So the
times are those of kernels alone: neither launches nor their overlap are in them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from core.bench.rates import Rates, measure_rates
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewrite.stated import check_runnable
from core.compilation.rewriting import Rewriter, bound_constants
from core.explain.layers import OUTSIDE, compact, layer_of
from core.explain.nodes import op_name, path_of
from core.explain.step import step_graph
from core.explain.timing import DEVICE, KernelTime, measure_moves, measure_times

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.models.loading import LoadedModel

_MODEL = re.compile(r"^logits\._model\.?")  # prefix of module paths in a paged step's function


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTime:
    """One node that runs something; its bytes and operations are those of `core.explain.moves`."""

    node: str
    op: str
    #: The implementation of a canonical op; "" for other ops.
    implementation: str
    #: Path of its module.
    path: str
    kernels: tuple[KernelTime, ...]
    #: Microseconds of all its kernels.
    us: float
    bytes: int
    flops: int

    @property
    def layer(self) -> str:
        """The layer it belongs to, "" for none."""
        return layer_of(self.path)

    @property
    def place(self) -> str:
        """The path inside of the layer."""
        return self.path[len(self.layer) :].strip(".") if self.layer else self.path

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for nodes which do the same in different layers."""
        return self.place, self.op, self.implementation, *((each.name, each.count) for each in self.kernels)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Layers that run the same."""

    layers: tuple[str, ...]
    #: The nodes of each layer.
    nodes: tuple[tuple[NodeTime, ...], ...]

    @property
    def name(self) -> str:
        """The layers in short, `model.layers.0-31`."""
        return compact(self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProfile:
    """The kernels of one phase."""

    phase: str
    batch: int
    tokens: int
    cache: str
    #: Whether the times are of the device's kernels or of host ops: `DEVICE` or `HOST`.
    source: str
    nodes: tuple[NodeTime, ...]
    rates: Rates
    notes: tuple[str, ...] = field(default=())

    @property
    def total_us(self) -> float:
        """Microseconds of all kernels."""
        return sum(node.us for node in self.nodes)

    @property
    def groups(self) -> tuple[LayerTimes, ...]:
        """Layers that run the same, and what belongs to no layer, in order of execution."""
        return group_layers(self.nodes)

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """Return the least time of so many bytes and operations at the measured rates."""
        return max(num_bytes / self.rates.bytes_per_s, flops / self.rates.flops_per_s) * 1e6

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values: one layer of each kind, its times averaged over those alike."""
        return {
            "phase": self.phase,
            "batch": self.batch,
            "tokens": self.tokens,
            "cache": self.cache,
            "source": self.source,
            "bytes_per_s": self.rates.bytes_per_s,
            "flops_per_s": self.rates.flops_per_s,
            "total_us": self.total_us,
            "num_kernels": sum(kernel.count for node in self.nodes for kernel in node.kernels),
            "floor_us": sum(self.floor_us(node.bytes, node.flops) for node in self.nodes),
            "notes": list(self.notes),
            "layers": [self._layer(group) for group in self.groups],
        }

    def _layer(self, group: LayerTimes) -> dict[str, Any]:
        total = self.total_us or 1.0
        rows = []
        for alike in zip(*group.nodes, strict=True):
            first, us = alike[0], statistics.fmean(node.us for node in alike)
            rows.append(
                {
                    **asdict(first),  # its kernels with their times in the first of the layers
                    "path": first.place,
                    "us": us,
                    "share": us * len(alike) / total,
                    "floor_us": self.floor_us(first.bytes, first.flops),
                }
            )
        us = sum(row["us"] for row in rows)
        return {
            "name": group.name,
            "count": len(group.layers),
            "us": us,
            "share": us * len(group.layers) / total,
            "floor_us": sum(row["floor_us"] for row in rows),
            "nodes": rows,
        }


def profile_phase(
    loaded: LoadedModel,
    device: Device,
    phase: str,
    *,
    batch: int = 1,
    tokens: int = 1024,
    kv_cache_dtype: str = "auto",
    switches: PassSwitches | None = None,
    strict: bool = False,
    rates: Rates | None = None,
    repeats: int = 3,
) -> KernelProfile:
    """Profile a decode step of `batch` sequences at a context of `tokens`, or a prefill of one prompt of `tokens`.

    kv_cache_dtype: as in `EngineConfig`.
    The graph is that of the engine's phase after passes and choice of implementations; times are medians of `repeats`
    runs after a warm-up. Raises what tracing and lowering raise; no engine may serve the model meanwhile.
    """
    rates = rates or measure_rates(device, loaded.dtype)
    with step_graph(loaded, device, phase, batch=batch, tokens=tokens, kv_cache_dtype=kv_cache_dtype) as step:
        rewriter = Rewriter(device, switches, strict=strict)
        traced = rewriter.rewrite(step.traced, tokens=(step.num_tokens, step.num_tokens)).traced
        check_runnable(phase, traced.module)
        choices = choose_implementations(traced.module, device.ops, constants=bound_constants(traced))
        chosen = {choice.node: choice for choice in choices}
        names = {node.name: op_name(node) for node in traced.module.graph.nodes}
        ops = {name: chosen[name].op if name in chosen else op for name, op in names.items()}
        sizes = measure_moves(traced, step.inputs, ops)
        times, source = measure_times(traced, step.inputs, device, repeats)
    nodes = tuple(
        NodeTime(
            node=node.name,
            op=ops[node.name],
            implementation=chosen[node.name].implementation if node.name in chosen else "",
            path=_MODEL.sub("", path_of(node)),
            kernels=times[node.name],
            us=sum(kernel.us for kernel in times[node.name]),
            bytes=sizes[node.name].bytes,
            flops=sizes[node.name].flops,
        )
        for node in traced.module.graph.nodes
        # On the host, making a view takes time too, which a captured graph does not spend.
        if node.name in times and (source == DEVICE or not sizes[node.name].is_view)
    )
    return KernelProfile(
        phase=phase,
        batch=step.batch,
        tokens=step.tokens,
        cache=step.cache,
        source=source,
        nodes=nodes,
        rates=rates,
        notes=step.notes,
    )


def group_layers(nodes: Sequence[NodeTime]) -> tuple[LayerTimes, ...]:
    """Join layers with the same nodes in the same order; nodes outside of all layers form the last group."""
    layers: dict[str, list[NodeTime]] = {}
    for node in nodes:
        layers.setdefault(node.layer, []).append(node)
    outside = layers.pop("", [])
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, inside in layers.items():
        alike.setdefault(tuple(node.kind for node in inside), []).append(name)
    groups = [LayerTimes(layers=tuple(names), nodes=tuple(tuple(layers[n]) for n in names)) for names in alike.values()]
    groups += [LayerTimes(layers=(OUTSIDE,), nodes=(tuple(outside),))] if outside else []
    return tuple(groups)
