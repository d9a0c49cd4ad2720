"""`core bisect`: name the first pass, op implementation or part of a lowered graph that breaks a model's numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from core.cli.model_argument import CACHE, DEVICE, DTYPE, MODEL, PHASE, check_model_options
from core.cli.output import console, print_json, status
from core.cli.pass_options import NO_PASS, NO_PASSES, ONLY_PASS, WITH_PASS, pass_switches
from core.engine.models.resolve import check_choice, resolve_model
from core.errors import UsageError

if TYPE_CHECKING:
    from core.common.passes.declaration import Pass
    from core.verify.bisect.bisection import Bisection

_LEVELS = ("full", "sample")


def bisect(
    model: str | None = MODEL,
    device: str = DEVICE,
    dtype: str = DTYPE,
    phase: str | None = PHASE,
    cache: str = CACHE,
    inject: str | None = typer.Option(
        None, metavar="MISTAKE", help="Plant a mistake, or a pass of yours as module:attribute; `help` lists them."
    ),
    level: str = typer.Option("full", help="full: every site and example; sample: a third of the sites, one example."),
    lowering: str | None = typer.Option(None, help="How graphs become callables, for example inline or inductor."),
    with_pass: list[str] = WITH_PASS,
    only_pass: list[str] = ONLY_PASS,
    no_pass: list[str] = NO_PASS,
    no_passes: bool = NO_PASSES,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead (docs/json.md)."),
) -> int:
    """Judge every pass, op implementation and lowering of a model on a device, each by an fp64 reference.

    The exit code is 1 if something breaks the numeric criterion, or if nothing at all could be judged.
    """
    if inject == "help":
        return _list_mistakes(as_json)
    found, wrong, facts = _bisect(
        model,
        device,
        dtype,
        phase,
        cache,
        inject,
        level,
        lowering,
        pass_switches(with_pass, only_pass, no_pass, no_passes),
        as_json,
    )
    if as_json:
        print_json("core.verify.bisect/1", **facts, **_injected_json(inject, wrong, found), **found.to_json())
    else:
        from core.cli.reports.bisect import print_bisection

        print_bisection(
            console(), found, wrong.name if wrong is not None and not _was_found(wrong, found) else "", facts
        )
    return 0 if found.passed else 1


def _bisect(
    model: str | None,
    device: str,
    dtype: str,
    phase: str | None,
    cache: str,
    inject: str | None,
    level: str,
    lowering: str | None,
    switches: Any,
    quiet: bool,
) -> tuple[Bisection, Pass | None, dict[str, Any]]:
    from core.host.selection import check_name, select_device

    check_model_options(model, dtype, phase=phase, cache=cache)
    check_choice("--level", level, _LEVELS)
    check_name(device)
    from core.compilation.rewriting import device_passes
    from core.engine.check.graphs import engine_graphs
    from core.engine.config import PHASES
    from core.verify.bisect.bisection import bisect as run
    from core.verify.bisect.bisection import injected

    resolved = select_device(device)
    name, _ = resolved.lowerings.resolve(lowering)
    passes = device_passes(resolved)
    wrong = None if inject is None else _wrong_pass(inject)
    if wrong is not None:
        passes = injected(passes, wrong)
    passes = switches.select(passes)  # a misspelt name is refused before the model is loaded
    if wrong is not None and wrong not in passes:
        raise UsageError(
            f"--inject {inject}", found=f"{wrong.name} is left out: {switches}", remedy=f"let {wrong.name!r} run"
        )
    with _without_warnings(), status("loading", quiet=quiet) as progress:
        loaded, title = resolve_model(model, resolved, dtype)
        progress("tracing")
        with engine_graphs(loaded, resolved, cache=cache, phases=PHASES if phase is None else (phase,)) as graphs:
            # A pass asked for by name is judged even if the device finds it unprofitable.
            asked = (*switches.asked, *(() if wrong is None else (wrong.name,)))
            options: dict[str, Any] = {"level": level, "lowering": name, "asked": asked, "progress": progress}
            found = run(graphs, resolved, passes, **options)
    facts = {
        "device": resolved.name,
        "plugin": str(resolved.plugin),
        "model": title,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "cache": graphs[0].cache,
        "level": level,
        "lowering": name,
        "examples": {graph.phase: len(graph.examples) if level == "full" else 1 for graph in graphs},
    }
    return found, wrong, facts


def _wrong_pass(inject: str) -> Pass:
    """Return the pass that `--inject` names: a planted mistake, or a `Pass` as module:attribute."""
    from importlib import import_module

    from core.common.passes.declaration import Pass
    from core.verify.planted import planted

    if ":" not in inject:
        return planted(inject)
    module, _, attribute = inject.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # importing runs the caller's code
        raise UsageError(
            f"--inject {inject}",
            found=f"{type(error).__name__}: {error}",
            remedy="name a pass as module:attribute, the module importable from here (PYTHONPATH)",
        ) from error
    if not isinstance(found, Pass):
        raise UsageError(
            f"--inject {inject}", found=f"a {type(found).__name__}", remedy="name a core.common.passes.declaration.Pass"
        )
    return found


def _list_mistakes(as_json: bool) -> int:
    from core.verify.planted import mistakes

    if as_json:
        rows = [{"name": each.name, "pass": each.of, "what": each.what} for each in mistakes()]
        print_json("core.verify.bisect/1", mistakes=rows)
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("mistake", "planted in", "what is wrong"):
        table.add_column(column, overflow="fold")
    for each in mistakes():
        table.add_row(each.name, each.of, each.what)
    console().print(table)
    return 0


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the warnings of passes (about a pass that was undone), which the report repeats in full. --debug keeps
    them."""
    log = logging.getLogger("core.passes")
    level = log.level
    if log.getEffectiveLevel() > logging.DEBUG:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _was_found(wrong: Pass | None, found: Bisection) -> bool | None:
    """Tell whether the injected pass is among those at fault; None where none was injected."""
    return None if wrong is None else any(each.kind == "pass" and each.name == wrong.name for each in found.faults)


def _injected_json(inject: str | None, wrong: Pass | None, found: Bisection) -> dict[str, Any]:
    fields = None if wrong is None else {"asked": inject, "pass": wrong.name, "found": _was_found(wrong, found)}
    return {"injected": fields}
