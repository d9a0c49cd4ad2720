"""The pass manager: orders passes, runs each on a graph, checks what it did, undoes what went wrong, and reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.common.collector import paused
from core.common.passes.context import Analyses, PassContext
from core.common.passes.declaration import Pass
from core.common.passes.identity import Known, describing_once
from core.common.passes.metadata import ASKS
from core.common.passes.pass_guards import Form, Stage
from core.common.passes.results import PassResult
from core.common.passes.rewrite import remove_dead
from core.compilation.rewrite.complaints import broken_promise, conflict, failed, left_undecided, unverified
from core.compilation.rewrite.mechanisms import apply_pass
from core.compilation.rewrite.order import choose, order, order_without_cycles, predecessors
from core.compilation.rewrite.pass_report import VERIFIED, PassReport
from core.compilation.rewrite.run import Check, Observer, Run
from core.compilation.rewrite.snapshot import Snapshot, interface_of, to_text
from core.errors import PassError

if TYPE_CHECKING:
    from torch import fx

    from core.capabilities import Capabilities
    from core.common.passes.constants import Constants

log = logging.getLogger("core.passes")


class PassManager:
    """Runs a fixed, ordered list of passes over graphs; the same list for every graph of a program.

    strict: a failing pass, a broken promise and two passes claiming one node are errors; else the pass is undone with a
    warning and the model runs without it. only, disable: names to run, or to leave out. enable: names to run although
    they run on request alone, or the device finds them unprofitable. capabilities: of the device the graphs are for.
    implemented: the canonical ops that it implements; None lifts to all of them. world_size: None asks
    torch.distributed. dump_dir: each changed graph is written there as text.
    """

    def __init__(
        self,
        passes: Iterable[Pass],
        *,
        strict: bool = False,
        only: Sequence[str] | None = None,
        disable: Sequence[str] = (),
        enable: Sequence[str] = (),
        capabilities: Capabilities | None = None,
        implemented: frozenset[str] | None = None,
        world_size: int | None = None,
        dump_dir: Path | None = None,
    ) -> None:
        chosen = choose(tuple(passes), only, disable, enable)
        self.passes, cycles = (order(chosen), {}) if strict else order_without_cycles(chosen)
        self._left_out = [(declared, cycles[declared.name]) for declared in chosen if declared.name in cycles]
        for declared, error in self._left_out:
            log.warning("%s\n  the model runs without pass %r of %s", error, declared.name, declared.owner)
        self._unprofitable = {
            declared.name: declared.traits.on_request for declared in chosen if declared.traits.on_request
        }
        self._unprofitable |= getattr(capabilities, "unprofitable", {})
        for name in (*(only or ()), *enable):
            self._unprofitable.pop(name, None)
        self._after = predecessors(self.passes)
        self._strict = strict
        self._capabilities = capabilities
        self._implemented = implemented
        self._world_size = _world_size() if world_size is None else world_size
        self._dump_dir = dump_dir
        self._num_runs = 0
        self._uuids: dict[str, str] = {}
        self._described: Known = {}

    def run(
        self,
        graph: fx.GraphModule,
        stage: Stage = "torch",
        *,
        tokens: tuple[int, int] | None = None,
        sizes: Sequence[Mapping[Any, int]] = (),
        constants: Constants | None = None,
        check: Check | None = None,
        observe: Observer | None = None,
        form: Form | None = None,
        refused: Exception | None = None,
    ) -> tuple[PassReport, ...]:
        """Rewrite `graph` in place by every pass of the stage and report each.

        form: of a functional graph; passes for another form are left out. refused: why the graph could not be converted
        to the stage; its passes are then skipped with that reason, which is raised if strict.
        tokens: least and most tokens that the graph serves. sizes: what its symbols are in each bucket. constants: the
        the constants of its placeholders; the graph gets one more placeholder for each that a pass adds there. check:
        judges each pass that matched.
        observe: is told of each pass that changed the graph and was not undone. Raises `PassError` naming the pass and
        its owner when strict; otherwise a failing pass is undone.
        """
        run = Run(graph, stage, tokens, tuple(sizes), constants, check, observe, Analyses(graph), [])
        passes = [
            each
            for each in self.passes
            if each.stage == stage and (each.traits.closes or form in (None, each.traits.form))
        ]
        if refused is not None:
            return self._skip(passes, refused)
        with paused():  # passes make many small objects and keep them
            reports = tuple(self._run_one(declared, run) for declared in passes)
        for declared, error in self._left_out:
            if declared.stage == stage:
                nothing = PassResult(matched=0)
                reports += (self._report(declared, nothing, time.perf_counter(), error=str(error)),)
        if run.changed:
            graph.recompile()
        self._num_runs += 1
        return reports

    def _skip(self, passes: Sequence[Pass], refused: Exception) -> tuple[PassReport, ...]:
        if self._strict:
            raise refused
        log.warning("%s\n  skipped: %s", refused, ", ".join(declared.name for declared in passes))
        reason, start = " ".join(str(refused).split()), time.perf_counter()
        return tuple(self._report(each, PassResult(matched=0), start, skipped=reason) for each in passes)

    @property
    def running(self) -> tuple[Pass, ...]:
        """The passes that may run: all, except those on request or unprofitable that were not asked for by name."""
        return tuple(declared for declared in self.passes if declared.name not in self._unprofitable)

    def told_apart(self, graph: fx.GraphModule, sizes: Sequence[Mapping[Any, int]]) -> Iterator[tuple[Hashable, ...]]:
        """Yield, for each bucket of a graph as it was traced, what passes say of it by `PassTraits.tells_apart`."""
        run, said = Run(graph, "torch", None, tuple(sizes), None, None, None, Analyses(graph), []), []
        for declared in self.running:
            tell, context = declared.traits.tells_apart, self._context(declared, run)
            if tell is not None and context.refusal() is None:
                try:
                    said.append([one for one, _ in zip(tell(context), sizes, strict=True)])
                except Exception as error:
                    raise failed(declared, error) from error
        return zip(*said, strict=True)

    def uuids(self, stage: Stage | None = None) -> tuple[str, ...]:
        """Return the identity of each pass, in order."""
        return tuple(self._uuid(declared) for declared in self.passes if stage in (None, declared.stage))

    def _uuid(self, declared: Pass) -> str:
        if declared.name not in self._uuids:
            with describing_once(self._described):
                self._uuids[declared.name] = declared.uuid()
        return self._uuids[declared.name]

    def _context(self, declared: Pass, run: Run) -> PassContext:
        return PassContext(
            module=run.graph,
            stage=run.stage,
            name=declared.name,
            owner=declared.owner,
            after=self._after[declared.name],
            guards=declared.guards,
            params=declared.params,
            capabilities=self._capabilities,
            world_size=self._world_size,
            tokens=run.tokens,
            sizes=run.sizes,
            constants=run.constants,
            implemented=self._implemented,
            analyses=run.analyses,
        )

    def _run_one(self, declared: Pass, run: Run) -> PassReport:
        start = time.perf_counter()
        context = self._context(declared, run)
        skipped = self._unprofitable.get(declared.name) or context.refusal()
        if skipped is not None:
            log.debug("pass %s: skipped, %s", declared.name, skipped)
            return self._report(declared, PassResult(matched=0), start, skipped=skipped)
        before, num_constants = Snapshot(run.graph), run.num_constants
        if run.constants is not None:
            run.constants.reads_content = declared.traits.reads_content
        expected: int | None = None
        try:
            expected = declared.expect(context) if callable(declared.expect) else declared.expect
            for name in declared.traits.requires:
                context.analysis(name)
            result = self._apply(declared, context, before, num_constants)
            changed = not before.is_current()
            if changed:
                run.changed.append(declared.name)
            report = self._report(declared, result, start, expected=expected)
            report = self._check(report, run, before, changed=changed)
        except Exception as error:
            failure = failed(declared, error)
            if self._strict:
                raise failure from error
            before.restore()
            if run.constants is not None:
                run.constants.forget(num_constants)
            run.analyses.invalidate()
            log.warning("%s\n  pass undone: the model runs without it", failure)
            return self._report(declared, PassResult(matched=0), start, expected=expected, error=str(failure))
        if run.observe is not None and changed:
            run.observe(report, before, run.graph)
        # Dozens of passes fit no given model: a log that names them hides those that do.
        log.log(logging.INFO if report.has_news else logging.DEBUG, "%s", report.summary())
        return report

    def _apply(self, declared: Pass, context: PassContext, before: Snapshot, num_constants: int) -> PassResult:
        """Run the pass, then lint, clean and invalidate; raise if the graph is invalid afterwards."""
        result = apply_pass(declared, context)
        if not isinstance(result, PassResult):
            raise TypeError(f"it returned {result!r}, not a PassResult")
        if before.is_current():
            return result
        added = () if context.constants is None else context.constants.added[num_constants:]
        if interface_of(context.module) != before.interface(name for name, _ in added):
            raise ValueError("it changed the graph's placeholders or the number of its outputs")
        context.graph.lint()
        removed = remove_dead(context.graph)
        assert context.analyses is not None
        # Of the analyses, removing dead nodes only affects positions.
        context.analyses.invalidate(declared.traits.preserves - ({"order"} if removed else set()))
        return result

    def _check(self, report: PassReport, run: Run, before: Snapshot, *, changed: bool) -> PassReport:
        """Check the promise of the pass, nodes claimed by two passes, and its numbers if asked to.

        Return its report with the result of verification.
        """
        claimed = [miss for miss in report.near_misses if miss.claimant]
        if claimed:
            self._complain(conflict(report, claimed[0]))
        if report.expected is not None and report.matched != report.expected:
            self._complain(broken_promise(report))
        undecided = [miss for miss in report.near_misses if ASKS in miss.reason]
        if undecided:
            log.warning("%s", left_undecided(report, undecided))
        if report.matched == 0 and not changed:
            return report
        if self._dump_dir is not None:
            stem = f"{self._num_runs:02d}-{run.stage}-{self._position(report.name):02d}-{report.name}"
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            (self._dump_dir / f"{stem}.before.txt").write_text(to_text(before.module()), encoding="utf-8")
            (self._dump_dir / f"{stem}.after.txt").write_text(to_text(run.graph), encoding="utf-8")
        if run.check is None:
            return report
        run.graph.recompile()
        doubt = run.check(report, before.module(), run.graph)
        if doubt and self._strict:
            raise unverified(report, doubt)
        return (
            report if doubt is None else replace(report, verification=f"not verified: {doubt}" if doubt else VERIFIED)
        )

    def _report(
        self,
        declared: Pass,
        result: PassResult,
        start: float,
        *,
        expected: int | None = None,
        skipped: str = "",
        error: str = "",
    ) -> PassReport:
        elapsed_ms = (time.perf_counter() - start) * 1e3
        return PassReport(
            name=declared.name,
            owner=declared.owner,
            stage=declared.stage,
            matched=result.matched,
            expected=expected,
            elapsed_ms=elapsed_ms,
            sites=result.sites,
            near_misses=result.near_misses,
            skipped=skipped,
            error=error,
            uuid=self._uuid(declared) if result.matched else "",
            codes=declared.traits.codes,
        )

    def _position(self, name: str) -> int:
        return [declared.name for declared in self.passes].index(name)

    def _complain(self, error: PassError) -> None:
        if self._strict:
            raise error
        log.warning("%s", error)


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
