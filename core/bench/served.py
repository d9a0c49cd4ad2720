"""The subject `core`: an engine as it serves, paged cache and captured graphs, and the replay of its graph alone."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core.bench.cells import Cell, Record
from core.bench.engines import SPARE, Engines
from core.common.graphs.backend import GraphKey
from core.compilation.report import counted
from core.engine.config import SamplingParams
from core.engine.serve.engine import Engine
from core.errors import ModelError

if TYPE_CHECKING:
    from core.compilation.report import ProgramReport, TraceReport


class CoreSubject:
    """The engine of a cell's phase, in the cell's own bucket: of the batch, or of exactly the prompt's size."""

    name = "core"

    def __init__(self, engines: Engines, *, keep_logits: bool) -> None:
        self._engines = engines
        self._loaded = engines.loaded
        self._keep_logits = keep_logits
        self._engine: Engine | None = None
        self._requests: list[int] = []
        self._prompt: list[int] = []
        self._first = 0

    def open(self, cell: Cell, record: Record) -> None:
        """Compile and capture, compute the prompts, and take one step; of prefill, do one prompt."""
        self._cell, self._record = cell, record
        engine = self._engine = self._engines.open(cell)
        record.start_s = engine.compile_time_s
        record.details["route"] = engine.route
        if cell.batch > (most := engine._runner.max_num_seqs):
            raise ModelError(
                f"a batch of {cell.batch} on the cache {engine.route!r}",
                found=f"the engine serves {counted(most, 'sequences')} at once there: {engine.route_reason}",
                remedy=f"ask for --batch {most}",
            )
        self._before = engine.report()
        prompts = cell.prompts(self._loaded.vocab_size)
        # Until the logits are saved, the buffers must belong to the step whose tokens came last.
        ahead, engine.runs_ahead = engine.runs_ahead, False
        if cell.phase == "prefill":
            self._prompt = prompts[0]
            record.tokens = [[self._prefill(engine)]]
        else:
            self._fill(engine, prompts)
        if self._keep_logits:
            self._note_logits(engine)
        engine.runs_ahead = ahead
        if ahead and cell.phase == "decode":
            self._decode(engine)  # it queues one more step, which a round must not time

    def ready(self) -> None:
        """Do nothing: an engine needs no preparation for a round."""

    def run(self, count: int) -> None:
        """Take so many steps of the engine, as many of them in a row as it does for a user, or serve so many prompts up
        to their first token."""
        engine = self._engine
        assert engine is not None
        if self._cell.phase == "prefill":
            for _ in range(count):
                self._prefill(engine)
        else:
            self._decode(engine, count)

    def replay(self, count: int) -> bool:
        """Replay the captured graph on the last step's inputs: it writes the same keys and values to the same slots."""
        key = self._key()
        if key is None:
            return False
        program, step = self._program, self._host_step(key)
        with program.serving():
            for _ in range(count):
                program.replay(key, step)
        return True

    def _host_step(self, key: GraphKey) -> dict[str, list[int]] | None:
        """Return the host-side arguments of the last step, which each replay of the same inputs has to be given."""
        names, inputs = self._program.host_arguments(key), self._program.inputs(key)
        return {name: inputs[name].reshape(-1).tolist() for name in names} or None

    def finish(self, record: Record) -> None:
        """Add how the program was made, and whether its graphs served every step."""
        assert self._engine is not None
        report, before = self._engine.report(), self._before
        record.details["program"] = summary(report)
        record.notes += report.notes
        for text, now, then in (
            ("ran eagerly {1} times: {0}", report.fallbacks, before.fallbacks),
            ("compiled while serving, {1} times: {0}", report.compiles, before.compiles),
        ):
            record.notes += [text.format(*each) for each in (Counter(now) - Counter(then)).items()]

    def close(self) -> None:
        """End the cell's sequences; the engine stays for the cells after it."""
        if self._engine is not None:
            for request in self._requests:
                self._engine.abort(request)
        self._engine, self._requests = None, []

    def free(self) -> None:
        """Close the engine too."""
        self.close()
        self._engines.close()

    def _fill(self, engine: Engine, prompts: list[list[int]]) -> None:
        start = time.perf_counter()
        cell, tokens = self._cell, self._record.tokens
        new = cell.limit - cell.tokens + self._engines.num_fills(cell) + SPARE
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, temperature=0)
        tokens += [[] for _ in prompts]
        self._requests = [engine.add_request(prompt, params) for prompt in prompts]
        self._first = self._requests[0]
        while not all(tokens):
            self._step(engine)
        self._decode(engine)
        self._record.details["fill_s"] = time.perf_counter() - start

    def _decode(self, engine: Engine, count: int = 1) -> None:
        """Take so many decode steps; raise `ModelError` where one of them was not a step of every sequence."""
        before = engine.stats()
        self._step(engine, count)
        after, batch = engine.stats(), self._cell.batch
        steps = after.steps.total() - before.steps.total()
        if (computed := after.computed - before.computed) != steps * batch:
            # Steps of fewer sequences are quicker: their time is not that of the cell.
            raise ModelError(
                f"decode steps of {batch} sequences",
                found=f"{steps} steps computed {computed} tokens: the key/value cache does not hold all sequences "
                "at once",
                remedy="ask for a smaller --batch or --context, or leave it more memory (peers: --apart)",
            )

    def _step(self, engine: Engine, count: int = 1) -> None:
        tokens, first, stats = self._record.tokens, self._first, engine.stats
        before, pace, most = stats().steps.total(), engine._steps.pace, engine._steps.pace.most
        while (left := count + before - stats().steps.total()) > 0:
            if not engine.has_unfinished:
                raise ModelError(
                    f"{count} more steps of {self._cell.name}",
                    found="its sequences have ended: the context holds no more tokens",
                    remedy="ask for fewer rounds, steps or tokens of context",
                )
            pace.most = min(left, most)
            for output in engine.step():
                tokens[output.request_id - first] += output.token_ids
        pace.most = most

    def _prefill(self, engine: Engine) -> int:
        params = SamplingParams(max_new_tokens=1, ignore_eos=True, temperature=0)
        self._requests = [engine.add_request(self._prompt, params)]  # one whose step fails is left to `close`
        while not (outputs := engine.step()):
            pass  # the step computed only a part of the prompt
        return outputs[0].token_ids[0]

    def _note_logits(self, engine: Engine) -> None:
        """Keep the logits of the last step, of those sequences that have taken exactly this one since their prompt."""
        key = self._key()
        if key is None:
            self._record.notes.append("logits not judged: there is no captured graph that could be repeated")
            return
        runner: Any = engine._runner
        with self._program.serving():
            logits: Tensor = self._program.replay(key, self._host_step(key))[1]
            gather = runner._calls[key.phase].gather("greedy")  # where each rank has a part of them
            logits = logits if gather is None else gather(logits)
        wanted = 1 if self._cell.phase == "prefill" else 2
        rows = [row for row, tokens in enumerate(self._record.tokens) if len(tokens) == wanted]
        self._record.logits = logits[rows].to("cpu", copy=True)
        self._record.logit_rows = rows

    @property
    def _program(self) -> Any:
        # The engine does not expose its program, since the buffers are its own; a measurement may still read it.
        assert self._engine is not None
        return self._engine._runner.program

    def _key(self) -> GraphKey | None:
        """Return the key of the graph that the cell's steps run.

        None where no graph is captured, where a replay would change the model's state, and where the graph takes values
        from the host that stand in no input.
        """
        if self._engine is None or self._engine.route != "paged" or self._engine._runner.cache.keeps_states:
            return None
        decode = self._cell.phase == "decode"
        sizes = {"tokens": self._cell.batch if decode else self._cell.tokens}
        sizes |= dict.fromkeys(("seqs", "rows"), self._cell.batch)
        guards = {"sampling": "greedy"} if decode else {}
        key: GraphKey | None = self._program.bucket(self._cell.phase, sizes, guards)
        known = key is not None and self._program.host_arguments(key) <= self._program.inputs(key).keys()
        return key if known else None


def summary(report: ProgramReport) -> dict[str, Any]:
    """Return from a report how the program was made: modes, passes with their matches, implementations of ops."""
    return {
        "modes": dict(report.modes),
        "lowering": report.lowering,
        "traces": [_trace(trace) for trace in report.traces],
        "captures": len(report.buckets),
        "graph_bytes": report.graph_bytes,
        "seconds": {
            "trace": sum(trace.trace_s for trace in report.traces),
            "passes": sum(trace.passes_s + trace.aten_s for trace in report.traces),
            "lower": sum(bucket.lower_s for bucket in report.buckets),
            "capture": report.capture_s,
            "total": report.total_s,
        },
    }


def _trace(trace: TraceReport) -> dict[str, Any]:
    ops: dict[str, Counter[str]] = {}
    for choice in trace.ops:
        ops.setdefault(choice.op, Counter())[choice.implementation] += 1
    return {
        "phase": trace.phase,
        "passes": {report.name: report.matched for report in trace.passes if report.matched},
        "undone": [report.name for report in trace.passes if report.error],
        "ops": {op: dict(counts) for op, counts in ops.items()},
    }
