"""What a compile did and what it cost: stages, graphs, passes, op choices, buckets."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from core.common.graphs.backend import GraphKey
    from core.compilation.capture.bucket_report import BucketReport
    from core.compilation.implementations import OpChoice
    from core.compilation.measuring import MeasuredChoice
    from core.compilation.rewrite.pass_report import PassReport

_SINGULAR = {"passes": "pass"}
_TOLD_S = 0.1
"""Parts of a start that took less are summed up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceReport:
    """One traced graph."""

    phase: str
    num_nodes: int
    #: Seconds of tracing; 0.0 for a trace that it shares.
    trace_s: float
    passes_s: float
    passes: tuple[PassReport, ...]
    ops: tuple[OpChoice, ...]
    #: The keys that it serves.
    buckets: tuple[GraphKey, ...]
    #: Why it was traced apart from the phase's first trace.
    reason: str = ""
    #: Seconds of turning it into ATen ops, no part of `passes_s`; 0.0 where no pass needs them.
    aten_s: float = 0.0
    #: Seconds of choosing implementations of canonical ops: compiling kernels that choosing waits for, timing those of
    #: which the fastest runs.
    choose_s: float = 0.0
    #: The phase whose trace it shares, which may be its own, for other guards or buckets; "" for a trace of its own.
    trace_of: str = ""
    #: What calls became that several implementations take, by bucket.
    measured: tuple[MeasuredChoice, ...] = ()
    #: Read from the compile cache, with the account of its passes from when it was made; nothing was traced now.
    cached: bool = False

    def passes_line(self) -> str:
        """Return what the passes did to this graph in one line: matches by pass, what was undone, the time."""
        fired = [f"{p.name} {p.matched}{' NOT VERIFIED' * p.is_unverified}" for p in self.passes if p.matched]
        undone = [f"{p.name} UNDONE" for p in self.passes if p.error]
        quiet = sum(not p.matched and not p.error for p in self.passes)
        parts = [*fired, *undone, *([f"{quiet} others matched nothing"] if quiet else [])]
        cost = "from the cache" if self.cached else f"{self.passes_s * 1e3:.0f} ms"
        return f"{', '.join(parts) or 'none'} ({cost})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheReport:
    """What the compile cache did for a program."""

    #: "off", "hit", "miss" (the entry is written), or "refused" (nothing is written, and the reason says why).
    state: str = "off"
    #: The key of the entry.
    key: str = ""
    folder: str = ""
    reason: str = ""
    #: On a miss, the factors in which the nearest entry of the same model differs.
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.state}{f' {self.key[:12]}' if self.key else ''}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramReport:
    """The account of one `core.compile` call; `str()` is for a terminal, `to_json()` for machines."""

    device: str
    plugin: str
    modes: dict[str, str]
    lowering: str
    traces: tuple[TraceReport, ...]
    buckets: tuple[BucketReport, ...]
    static_bytes: int
    total_s: float
    #: What was done differently than asked or preferred, each with the reason.
    notes: tuple[str, ...] = ()
    #: How often each key was replayed.
    replays: Mapping[GraphKey, int] = field(default_factory=dict)
    #: How often the model ran eagerly because no graph served the call, by reason.
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    #: How often a call was larger than the phase's largest bucket, and what was done then. Those that ran eagerly are
    #: among the fallbacks as well.
    oversized: Mapping[str, int] = field(default_factory=dict)
    #: Buckets not captured since the device holds no more graphs, each with the reason.
    dropped: Mapping[GraphKey, str] = field(default_factory=dict)
    #: How often a larger captured bucket ran in place of a dropped one.
    stand_ins: Mapping[str, int] = field(default_factory=dict)
    #: What torch compiled while the program was serving, and how often.
    compiles: Mapping[str, int] = field(default_factory=dict)
    #: How often a bucket ran by a quicker lowering, since its own was still being compiled.
    interim: Mapping[GraphKey, int] = field(default_factory=dict)
    #: Buckets that are being compiled.
    pending: tuple[GraphKey, ...] = ()
    #: Seconds that compilers took beside the program's steps; 0.0 where none did, or until they are done.
    background_s: float = 0.0
    #: Kernels compiled for this program, those that were found compiled on disk not counted.
    num_kernels: int = 0
    #: Those of them that were compiled ahead of the first run, several at a time.
    num_ahead: int = 0
    #: Seconds that the first capture waited for these.
    ahead_s: float = 0.0
    #: Calls of ops that were timed for this program, those whose times were found on disk not counted.
    num_measured: int = 0
    #: What the compile cache did.
    cache: CacheReport = field(default_factory=CacheReport)

    @property
    def graph_bytes(self) -> int:
        """Device memory that all captures took together."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def capture_s(self) -> float:
        """Seconds of all captures, warm-ups included."""
        return sum(bucket.capture_s for bucket in self.buckets)

    @property
    def num_traces(self) -> int:
        """How many graphs were traced; one that phases share counts once, one from the cache not at all."""
        return sum(not trace.trace_of and not trace.cached for trace in self.traces)

    @property
    def num_passes(self) -> int:
        """How many times a pass ran over a graph; those that its guards refused are left out."""
        return sum(not each.skipped for trace in self.traces if not trace.cached for each in trace.passes)

    @property
    def counters(self) -> dict[str, int]:
        """Counts of the costs of a start: traces, passes run, kernels compiled, buckets captured."""
        return {
            "traces": self.num_traces,
            "passes": self.num_passes,
            "kernels": self.num_kernels,
            "measured": self.num_measured,
            "captures": self.num_captures,
        }

    @property
    def counters_text(self) -> str:
        """The counters as one line of text."""
        return ", ".join(counted(count, name) for name, count in self.counters.items())

    @property
    def num_captures(self) -> int:
        """How many buckets were captured."""
        return len(self.buckets)

    def time_text(self, total_s: float) -> str:
        """Return where a start of so many seconds went, the longest part first; of what was cached nothing is told.

        Graphs are lowered in threads of their own, so that parts may add up to more than the start.
        """
        made = [trace for trace in self.traces if not trace.cached]
        parts = {
            "tracing": sum(trace.trace_s for trace in made),
            "passes": sum(trace.passes_s + trace.aten_s for trace in made),
            "choosing and building kernels": sum(trace.choose_s for trace in made) + self.ahead_s,
            "lowering": sum(bucket.lower_s for bucket in self.buckets),
            "capturing": self.capture_s,
        }
        parts["the rest"] = total_s - sum(parts.values())
        told = sorted((item for item in parts.items() if item[1] >= _TOLD_S), key=lambda item: -item[1])
        each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in told)
        return f"{total_s:.1f} s" + (f": {each}" if len(told) > 1 else "")

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-ready values; keys are written as text, `decode[8, 8]`."""
        document = asdict(self)
        for trace, source in zip(document["traces"], self.traces, strict=True):
            trace["buckets"] = [str(key) for key in source.buckets]
            for timed, chosen in zip(trace["measured"], source.measured, strict=True):
                timed |= {"bucket": str(chosen.bucket), "times_us": dict(chosen.times_us)}
        for bucket, kept in zip(document["buckets"], self.buckets, strict=True):
            bucket["key"] = str(kept.key)
        document["counters"] = self.counters
        document["dropped"] = {str(key): reason for key, reason in self.dropped.items()}
        document["replays"] = {str(key): count for key, count in self.replays.items()}
        document["interim"] = {str(key): count for key, count in self.interim.items()}
        document["pending"] = [str(key) for key in self.pending]
        return document

    def __str__(self) -> str:
        lines = [
            f"{self.device} ({self.plugin}), lowering {self.lowering}, "
            + ", ".join(f"{phase}: {mode}" for phase, mode in self.modes.items())
        ]
        for trace in self.traces:
            ops = Counter(f"{choice.op} -> {choice.implementation}" for choice in trace.ops)
            lines.append(
                f"  trace {trace.phase}: {trace.num_nodes} nodes "
                + _origin(trace)
                + (f"to ATen ops in {trace.aten_s:.2f} s, " if trace.aten_s else "")
                + f"serves {counted(len(trace.buckets), 'buckets')}"
                + (f" ({trace.reason})" if trace.reason else "")
            )
            lines += [f"    {name}: {count}" for name, count in sorted(ops.items())]
            lines += [f"    {line}" for line in _measured_lines(trace)]
            told = [p for p in trace.passes if p.has_news]
            lines += [f"    {p.summary()}" for p in told]
            lines += _quiet_line(trace.passes, bool(told))
        for bucket in self.buckets:
            lines.append(
                f"  {bucket.key}: lowered in {bucket.lower_s:.2f} s, captured in {bucket.capture_s:.2f} s, "
                f"{bucket.num_bytes / 2**20:.1f} MiB"
                + (f", {counted(bucket.num_graphs, 'graphs')} around {_by_name(bucket.eager)}" if bucket.eager else "")
            )
        if len(self.buckets) > 1:
            lines.append(
                f"  {len(self.buckets)} buckets captured in {self.capture_s:.2f} s, {self.graph_bytes / 2**20:.1f} MiB"
            )
        if self.num_ahead:
            lines.append(f"  kernels: {self.num_ahead} of {self.num_kernels} compiled ahead of the first run")
        lines += [f"  note: {note}" for note in self.notes]
        if self.cache.state != "off":
            lines.append(f"  cache {self.cache}; {self.counters_text}")
        lines += self._served_lines()
        lines.append(f"  total {self.total_s:.2f} s, static buffers {self.static_bytes / 2**20:.2f} MiB")
        return "\n".join(lines)

    def _served_lines(self) -> list[str]:
        """Return what was served: replays by phase and key, eager calls and compiles with their reasons."""
        lines = []
        for phase, mode in self.modes.items():
            if mode == "off":
                lines.append(f"  served {phase}: eagerly, not counted (mode off)")
                continue
            used = {key: count for key, count in self.replays.items() if key.phase == phase and count}
            each = ", ".join(f"{key}: {count}" for key, count in used.items())
            lines.append(f"  served {phase}: {counted(sum(used.values()), 'replays')}" + (f" ({each})" if each else ""))
        eager, compiled = sum(self.fallbacks.values()), sum(self.compiles.values())
        if any(mode != "off" for mode in self.modes.values()):
            lines.append(f"  {counted(eager, 'eager calls')}, {counted(compiled, 'compiles')} while serving")
        interim = ", ".join(f"{key}: {count}" for key, count in self.interim.items())
        lines += [f"  not compiled yet: {', '.join(map(str, self.pending))}"] if self.pending else []
        lines += [f"  ran before it was compiled: {interim}"] if interim else []
        lines += [f"  compiled beside the steps in {self.background_s:.1f} s"] if self.background_s else []
        lines += [f"  {counted(count, 'replays')} of {which}" for which, count in self.stand_ins.items()]
        lines += [f"  {counted(count, 'oversized calls')}: {what}" for what, count in self.oversized.items()]
        lines += [f"  ran eagerly {counted(count, 'times')}: {reason}" for reason, count in self.fallbacks.items()]
        return lines + [
            f"  compiled while serving, {counted(count, 'times')}: {name}" for name, count in self.compiles.items()
        ]


def _origin(trace: TraceReport) -> str:
    """Return the origin of a graph (traced, shared or cached), and how long it took."""
    if trace.cached:
        return f"from the cache, {len(trace.passes)} passes when it was made, "
    traced = f"of the trace of {trace.trace_of}, " if trace.trace_of else f"in {trace.trace_s:.2f} s, "
    return f"{traced}{counted(len(trace.passes), 'passes')} in {trace.passes_s * 1e3:.1f} ms, "


def _measured_lines(trace: TraceReport) -> list[str]:
    """Say which implementations were the fastest, and in how many buckets."""
    calls = Counter((each.op, each.implementation) for each in trace.measured for _ in each.nodes)
    return [
        f"{op} by time -> {name}: {counted(count, 'calls')} in all buckets"
        for (op, name), count in sorted(calls.items())
    ]


def _quiet_line(passes: Sequence[PassReport], others: bool) -> list[str]:
    """Return a line that counts the passes without news; none where there are none. others: whether any has news."""
    quiet = [each for each in passes if not each.has_news]
    skipped = sum(bool(each.skipped) for each in quiet)
    if not quiet:
        return []
    said = f"    {len(quiet)} {'other ' if others else ''}{'pass' if len(quiet) == 1 else 'passes'} matched nothing"
    return [f"{said}, {skipped} of them skipped" if skipped else said]


def counted(count: int, plural: str) -> str:
    """Return a count with what is counted, such as "1 pass" and "2 passes"."""
    return f"{count} {_SINGULAR.get(plural, plural.removesuffix('s')) if count == 1 else plural}"


def _by_name(names: Sequence[str]) -> str:
    """Return the distinct names with their counts; numbers in module paths become *."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    return ", ".join(f"{count} eager {name}" for name, count in counts.items())
