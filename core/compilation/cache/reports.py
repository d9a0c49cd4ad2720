"""A finished graph with its report, and the report as JSON and back: what passes did, which implementations ops got."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.common.passes.results import NearMiss
from core.compilation.cache.literals import decode, encode
from core.compilation.capture.alike import Cut
from core.compilation.implementations import OpChoice
from core.compilation.measuring import MeasuredChoice
from core.compilation.report import TraceReport
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import ConstantSlot, TracedGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedGraph:
    """A graph as a phase runs it, with its account. breaks: the number of places where a piecewise mode cuts it.

    contents: tensors whose content a pass may have read. sourceless: names of the tensors that passes added with
    unknown sources.
    """

    traced: TracedGraph
    report: TraceReport
    breaks: int
    #: Where it is cut to be compiled in two parts.
    cut: Cut | None = None
    contents: tuple[Tensor, ...] = ()
    sourceless: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The constants of the graph."""
        found = (slot.value for slot in self.traced.slots if isinstance(slot, ConstantSlot))
        return tuple(value for value in found if isinstance(value, Tensor))


def encode_report(report: TraceReport) -> dict[str, Any]:
    """Return a report as JSON-ready values."""
    return {
        "phase": report.phase,
        "num_nodes": report.num_nodes,
        "reason": report.reason,
        "trace_of": report.trace_of,
        "buckets": [encode_key(key) for key in report.buckets],
        "passes": [asdict(each) for each in report.passes],
        "ops": [asdict(each) for each in report.ops],
        "measured": [asdict(each) | {"bucket": encode_key(each.bucket)} for each in report.measured],
    }


def decode_report(text: Mapping[str, Any], known: Collection[GraphKey]) -> TraceReport:
    """Return a report marked as from the cache, its times 0; raise `ValueError` for a bucket that is not known."""
    keys = tuple(decode_key(each) for each in text["buckets"])
    if not set(keys) <= set(known):
        raise ValueError(f"the graph serves {', '.join(map(str, keys))}")
    return TraceReport(
        phase=text["phase"],
        num_nodes=text["num_nodes"],
        trace_s=0.0,
        passes_s=0.0,
        passes=tuple(_pass(each) for each in text["passes"]),
        ops=tuple(map(_choice, text["ops"])),
        measured=tuple(map(_measured, text["measured"])),
        buckets=keys,
        reason=text["reason"],
        trace_of=text["trace_of"],
        cached=True,
    )


def _choice(text: Mapping[str, Any]) -> OpChoice:
    return OpChoice(**{**text, "refused": tuple(map(tuple, text["refused"])), "others": tuple(text["others"])})


def _measured(text: Mapping[str, Any]) -> MeasuredChoice:
    lists = {"nodes": tuple(text["nodes"]), "times_us": tuple(map(tuple, text["times_us"]))}
    return MeasuredChoice(**{**text, **lists, "bucket": decode_key(text["bucket"])})


def _pass(text: Mapping[str, Any]) -> PassReport:
    misses = tuple(NearMiss(**each) for each in text["near_misses"])
    lists = {name: tuple(text[name]) for name in ("sites", "codes")}
    return PassReport(**{**text, **lists, "elapsed_ms": 0.0, "near_misses": misses})


def encode_key(key: GraphKey) -> dict[str, Any]:
    """Return the key of a bucket as JSON-ready values."""
    return {"phase": key.phase, "dims": list(key.dims), "guards": [[name, encode(value)] for name, value in key.guards]}


def decode_key(text: Mapping[str, Any]) -> GraphKey:
    """Return the key that `encode_key` wrote."""
    guards = tuple((name, decode(value, {})) for name, value in text["guards"])
    return GraphKey(text["phase"], tuple(text["dims"]), guards)
