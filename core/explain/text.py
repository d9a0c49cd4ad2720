"""An explanation for a terminal: passes with counts and times, ops by layer, op choices, near-misses by reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from io import StringIO
from typing import TYPE_CHECKING, Any

from core.compilation.implementations import ORIGINAL_NODES, REFERENCE
from core.compilation.rewrite.pass_report import PassReport
from core.explain import layer_errors
from core.explain.layers import compact, layer_kinds, ordered_ops

if TYPE_CHECKING:
    from rich.table import Table

    from core.explain.explanation import Explanation, PhaseExplanation, StageExplanation
    from core.explain.nodes import NodeRecord

NO_IMPLEMENTATION = "the device brings none"
_COLUMNS = 160
_MAX_KINDS = 4
_MAX_OPS = 16


def to_text(explanation: Explanation, *, full: bool = False, width: int = _COLUMNS) -> str:
    """Return what `renderables` gives as plain text."""
    from rich.console import Console

    file = StringIO()
    console = Console(file=file, width=width, highlight=False, color_system=None)
    for item in renderables(explanation, full=full):
        console.print(item)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def renderables(explanation: Explanation, *, full: bool = False) -> Iterator[Any]:
    """Yield tables and lines for a rich console. full: the graphs too, as one list of nodes that stay, go and come."""
    from rich.text import Text

    for name, value in header(explanation):
        yield Text.assemble((f"{name:<9}", "bold"), value, no_wrap=False)
    if explanation.quantization is not None:
        yield from layer_errors.renderables(explanation.quantization, full=full)
    for phase in explanation.phases:
        yield Text()
        yield Text.assemble((phase.phase, "bold"), f": {phase_summary(phase)}", no_wrap=False)
        for stage in phase.stages:
            yield Text.assemble((f"stage {stage.stage}", "bold"), f": {stage_summary(stage)}")
            yield from _passes(stage)
            yield _layers(stage, None if full else _MAX_OPS)
            yield from _misses(stage)
            if full:
                yield Text("graph: - taken out, + put in", style="bold")
                yield from (_graph_line(sign, node) for sign, node in difference(stage.before, stage.after))
        yield from _ops(phase)


def header(explanation: Explanation) -> list[tuple[str, str]]:
    """Return name and value of each fact above the phases."""
    versions = ", ".join(f"{name} {version}" for name, version in explanation.versions.items())
    left_out = f"; left out: {', '.join(explanation.left_out)}" if explanation.left_out else ""
    return [
        *explanation.model.items(),
        ("device", f"{explanation.device}: {explanation.product}; plugin {explanation.plugin}"),
        ("versions", versions),
        ("passes", f"{explanation.switches}{left_out}"),
    ]


def phase_summary(phase: PhaseExplanation) -> str:
    """Return one line about a phase: its inputs and what each step took."""
    shapes = ", ".join(f"{name} {shape}" for name, shape in phase.inputs.items())
    aten = f"turned into ATen ops in {phase.aten_s:.2f} s, " if phase.aten_s else ""
    return (
        f"{shapes}; traced in {phase.trace_s:.2f} s, passes {phase.passes_s:.2f} s, {aten}"
        f"implementations chosen in {phase.lower_s:.2f} s"
    )


def stage_summary(stage: StageExplanation) -> str:
    """Return one line about a stage: ops, sites and near-misses."""
    sites = sum(report.matched for report in stage.passes)
    misses = sum(len(report.near_misses) for report in stage.passes)
    return (
        f"{num_calls(stage.before)} ops become {num_calls(stage.after)}; {sites} sites rewritten, {misses} near-misses"
    )


def num_calls(nodes: Sequence[NodeRecord]) -> int:
    """Return how many nodes compute something."""
    return sum(node.is_call for node in nodes)


def note(report: PassReport) -> str:
    """Return what a reader must know of a pass besides its counts, "" for nothing."""
    if report.error:
        return f"UNDONE: {' '.join(report.error.split())}"
    if report.skipped:
        return f"skipped: {report.skipped}"
    if report.expected is not None and report.expected != report.matched:
        return f"PROMISE BROKEN: {report.expected} expected"
    conflicts = sum(bool(miss.claimant) for miss in report.near_misses)
    if conflicts:
        return f"CONFLICT: {conflicts} sites are claimed by other passes too"
    return "" if report.matched else "matched nothing"


def is_alarm(report: PassReport) -> bool:
    """Return whether something is wrong: the pass was undone, broke its promise, or is in conflict with another."""
    return note(report).partition(":")[0].isupper()


def _table(*columns: str) -> Table:
    """Return a table without rows; its first column is never wrapped, the others are between words."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    return table


def telling(stage: StageExplanation) -> list[PassReport]:
    """Return the passes that matched, nearly matched, or went wrong."""
    return [report for report in stage.passes if report.matched or report.near_misses or is_alarm(report)]


def idle_lines(stage: StageExplanation) -> Iterator[str]:
    """Yield which passes have nothing to tell: those that matched nothing, and by the reason those skipped."""
    told = {report.name for report in telling(stage)}
    others = [report for report in stage.passes if report.name not in told]
    idle = [report.name for report in others if not report.skipped]
    if idle:
        yield f"matched nothing: {', '.join(idle)}"
    for reason, names in _by_reason(others).items():
        yield f"skipped: {', '.join(names)}: {reason}"


def _passes(stage: StageExplanation) -> Iterator[Any]:
    """Tabulate the passes that have anything to tell; name the others below, those that did not run with the reason."""
    from rich.text import Text

    if told := telling(stage):
        table = _table("pass", "owner", "matched", "near-misses", "ms", "note")
        for index in range(2, 5):
            table.columns[index].justify = "right"
        for report in told:
            counts = (str(report.matched), str(len(report.near_misses)), f"{report.elapsed_ms:.1f}")
            style = "red" if is_alarm(report) else "" if report.matched else "dim"
            table.add_row(report.name, report.owner, *counts, Text(note(report)), style=style)
        yield table
    yield from (Text(line, style="dim", no_wrap=False) for line in idle_lines(stage))
    if not stage.passes:
        yield Text("no pass is enabled", style="dim")


def _by_reason(reports: Sequence[PassReport]) -> dict[str, list[str]]:
    """Return the names of the passes that were skipped, by the reason."""
    found: dict[str, list[str]] = {}
    for report in reports:
        if report.skipped:
            found.setdefault(report.skipped, []).append(report.name)
    return found


def _layers(stage: StageExplanation, max_ops: int | None) -> Table:
    """Tabulate ops whose number changes, by layers that are alike: canonical ops, then the most changed."""
    from rich.text import Text

    kinds = layer_kinds(stage.layers)
    shown = kinds[:_MAX_KINDS]
    table = _table("ops", *(kind.name for kind in shown))
    for column in table.columns[1:]:
        column.justify = "right"
    totals = ((kind.before.values(), kind.after.values()) for kind in shown)
    table.add_row("all", *(_counts(sum(before), sum(after)) for before, after in totals), style="bold")
    changed = {name for kind in shown for name in (*kind.before, *kind.after) if len({*kind.counts(name)}) > 1}
    ordered = [name for name in ordered_ops(shown) if name in changed]
    for name in ordered[:max_ops]:
        table.add_row(Text(name), *(_counts(*kind.counts(name)) for kind in shown))
    captions = []
    if max_ops is not None and len(ordered) > max_ops:
        captions.append(f"{len(ordered) - max_ops} more ops change (--full): {', '.join(ordered[max_ops:])}")
    if len(kinds) > len(shown):
        rest = [layer for kind in kinds[_MAX_KINDS:] for layer in kind.layers]
        captions.append(f"{len(kinds) - len(shown)} more kinds of layers (--json, --html): {compact(rest)}")
    table.caption = Text("\n".join(captions), justify="left") if captions else None
    return table


def _counts(before: int, after: int) -> str:
    if before == after:
        return str(before) if before else "·"
    return f"{before} -> {after}"


_TAKES_IT_TOO = "it takes the call too; a program runs the fastest"


def _ops(phase: PhaseExplanation) -> Iterator[Any]:
    from rich.text import Text

    groups = op_groups(phase)
    if not groups:
        return
    table = _table("canonical op", "calls", "becomes", "not chosen, and why")
    known = {node.name for node in phase.stages[-1].after}
    for (op, implementation, refused), names in groups.items():
        own = implementation not in (REFERENCE, ORIGINAL_NODES)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused) or ("" if own else NO_IMPLEMENTATION)
        table.add_row(op, calls_text(names, known), implementation, Text(reasons))
    yield table


def calls_text(names: Sequence[str], known: Set[str]) -> str:
    """Return how many calls of an op there are; apart, those that came back where a fused op became its original."""
    num_inside = sum(name not in known for name in names)
    return f"{len(names) - num_inside}" + (f" + {num_inside} in ops put back" if num_inside else "")


def op_groups(phase: PhaseExplanation) -> dict[tuple[str, str, tuple[tuple[str, str], ...]], list[str]]:
    """Return the node names by op, implementation, and the implementations that were passed over, with reasons."""
    groups: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[str]] = {}
    for choice in phase.ops:
        passed_over = (*choice.refused, *((name, _TAKES_IT_TOO) for name in choice.others))
        groups.setdefault((choice.op, choice.implementation, passed_over), []).append(choice.node)
    return groups


def _misses(stage: StageExplanation) -> Iterator[Any]:
    from rich.text import Text

    if not stage.near_misses:
        return
    table = _table("near-misses of", "count", "reason", "sites", "e.g.")
    nodes = {node.name: node for node in (*stage.after, *stage.before)}
    for group in stage.near_misses:
        reason = f"{group.reason} (claimed by {group.claimant})" if group.claimant else group.reason
        example = nodes.get(group.nodes[0])
        where = (example.source or example.line) if example is not None else group.nodes[0]
        cells = (group.pass_name, str(group.count), reason, compact(group.sites), where)
        table.add_row(*map(Text, cells))
    yield table


def difference(before: Sequence[NodeRecord], after: Sequence[NodeRecord]) -> Iterator[tuple[str, NodeRecord]]:
    """Yield the nodes of both graphs in order: "-" with those that went, "+" with new ones, " " with the others."""
    made = {node.name for node in after if node.change >= 0}
    position = {node.name: index for index, node in enumerate(before) if node.change < 0}
    following = iter(before)
    for node in after:
        if node.name in position and node.name not in made:
            yield from (("-", old) for old in _until(following, node.name))
            yield " ", node
        else:
            yield "+", node
    yield from (("-", old) for old in following if old.change >= 0)


def _until(nodes: Iterator[NodeRecord], name: str) -> Iterator[NodeRecord]:
    """Yield the nodes that went, up to the one of that name."""
    for node in nodes:
        if node.name == name:
            return
        if node.change >= 0:
            yield node


def _graph_line(sign: str, node: NodeRecord) -> Any:
    from rich.text import Text

    where = f"  # {node.path}" if node.path else ""
    by = f"  [{node.by}]" if node.by and sign != " " else ""
    return Text(f"{sign} {node.line}{where}{by}", style={"-": "red", "+": "green"}.get(sign, ""), overflow="fold")
