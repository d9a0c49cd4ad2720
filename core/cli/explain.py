"""`core explain`: what the passes do to a model's graphs on a device, in the terminal, as JSON or as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from core.cli.model_argument import (
    CACHE,
    CALIBRATION,
    DEVICE,
    DTYPE,
    KV_CACHE_DTYPE,
    MODEL,
    PHASE,
    QUANTIZE,
    check_model_options,
)
from core.cli.output import check_file, print_items, print_json, status
from core.cli.pass_options import NO_PASS, NO_PASSES, ONLY_PASS, WITH_PASS, pass_switches
from core.cli.ranks import EXPERTS, check_experts
from core.engine.models.resolve import resolve_model
from core.errors import UsageError

if TYPE_CHECKING:
    from core.bench.kernels import KernelProfile
    from core.compilation.rewrite.order import PassSwitches
    from core.engine.models.quantizing import Quantize
    from core.engine.models.sharding import ExpertCut
    from core.explain.explanation import Explanation


def explain(
    model: str | None = MODEL,
    device: str = DEVICE,
    dtype: str = DTYPE,
    phase: str | None = PHASE,
    cache: str = CACHE,
    quantize: str | None = QUANTIZE,
    calibration: Path | None = CALIBRATION,
    sensitivity: bool = typer.Option(
        False,
        "--sensitivity",
        help="With --quantize: measure, too, the errors that pile up from layer to layer, and how far each layer alone "
        "moves the predictions; the model runs once for each layer.",
    ),
    kv_cache_dtype: str = KV_CACHE_DTYPE,
    html: Path | None = typer.Option(None, metavar="FILE", help="Write one self-contained HTML page."),
    tp: int = typer.Option(
        1,
        "--tp",
        min=1,
        help="Show the graphs of rank 0 of so many, and how the model is cut (docs/tensor_parallel.md).",
    ),
    experts: str = EXPERTS,
    full: bool = typer.Option(False, "--full", help="Print the graphs too."),
    kernels: bool = typer.Option(False, "--kernels", help="Run the finished graphs and show the kernels of each node."),
    batch: int = typer.Option(1, help="With --kernels: sequences of the decode step."),
    context: int = typer.Option(64, help="With --kernels: tokens of each sequence, or of the prompt."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead (docs/json.md)."),
    strict: bool = typer.Option(False, "--strict", help="A failing pass or a broken promise is an error."),
    with_pass: list[str] = WITH_PASS,
    only_pass: list[str] = ONLY_PASS,
    no_pass: list[str] = NO_PASS,
    no_passes: bool = NO_PASSES,
) -> int:
    """Show what each pass matched in a model's graphs, what it did not and why, and what ops become on a device.

    The exit code is 1 if a pass failed and was undone.
    """
    from core.host.selection import check_name

    quantized: Any = {"quantize": quantize, "calibration": calibration, "sensitivity": sensitivity}
    check_model_options(model, dtype, phase=phase, cache=cache, kv_cache_dtype=kv_cache_dtype, **quantized)
    cut = check_experts(experts)
    check_name(device)
    check_file("--html", html)
    for option, value in (("--batch", batch), ("--context", context)):
        if value < 1:
            raise UsageError(
                f"{option} {value}", found="there is nothing below 1", remedy="pass a number of at least 1"
            )
    if tp > 1 and (kernels or quantize):
        given = "--kernels" if kernels else "--quantize"
        found = "one process plays rank 0 of several, and its collectives compute nothing"
        raise UsageError(f"--tp {tp} with {given}", found=found, remedy=f"leave {given} or --tp out")
    switches = pass_switches(with_pass, only_pass, no_pass, no_passes)
    from core.engine.models.quantizing import Quantize
    from core.engine.parallel.pretended import first_of

    scheme = Quantize.of(quantize, calibration, sensitivity=sensitivity)
    with status("loading and tracing the model", quiet=as_json):
        sizes = (batch, context) if kernels else None
        with first_of(tp):
            explanation, profiles = _explain(
                model, device, dtype, phase, cache, kv_cache_dtype, switches, strict, sizes, scheme, (tp, cut)
            )
    if html is not None:
        from core.explain.html import to_html

        html.write_text(to_html(explanation), encoding="utf-8")
    if as_json:
        print_json(
            "core.explain/1",
            **explanation.to_json(nodes=full),
            html=None if html is None else str(html),
            kernels=[profile.to_json() for profile in profiles] if kernels else None,
        )
    else:
        _print(explanation, profiles, full, html)
    return 1 if explanation.undone else 0


def _explain(
    model: str | None,
    device: str,
    dtype: str,
    phase: str | None,
    cache: str,
    kv_cache_dtype: str,
    switches: PassSwitches,
    strict: bool,
    sizes: tuple[int, int] | None,
    scheme: Quantize | None,
    ranks: tuple[int, ExpertCut],
) -> tuple[Explanation, list[KernelProfile]]:
    """Explain, and where sizes (batch, context) are given profile the same phases. ranks: how many, and how their
    experts are cut."""
    from core.compilation.rewriting import device_passes
    from core.engine.check.graphs import engine_graphs
    from core.engine.config import PHASES
    from core.explain.explanation import explain
    from core.host.selection import select_device
    from core.quantization.report import report_of

    resolved = select_device(device)
    switches.select(device_passes(resolved))  # a misspelt name is refused before the model is loaded
    loaded, title = resolve_model(model, resolved, dtype, quantize=scheme)
    facts = {
        "model": f"{type(loaded.model).__name__}, {title}: {loaded.num_parameters / 1e6:.1f} M parameters, "
        + str(loaded.dtype).removeprefix("torch.")
    }
    if ranks[0] > 1:
        facts |= _cut(loaded.model, *ranks)
    report = report_of(loaded.model)
    facts |= {} if report is None else {"scheme": report.summary()}
    phases: tuple[str, ...] = PHASES if phase is None else (phase,)
    with engine_graphs(loaded, resolved, cache=cache, phases=phases, kv_cache_dtype=kv_cache_dtype) as graphs:
        facts["cache"] = graphs[0].cache
        phases = tuple(graph.phase for graph in graphs)
        explanation = explain(graphs, resolved, switches=switches, strict=strict, model=facts, quantization=report)
    if sizes is None:
        return explanation, []
    from core.bench.kernels import profile_phase
    from core.bench.rates import measure_rates

    options: dict[str, Any] = {"batch": sizes[0], "tokens": sizes[1], "switches": switches, "strict": strict}
    options |= {"kv_cache_dtype": kv_cache_dtype, "rates": measure_rates(resolved, loaded.dtype)}
    return explanation, [profile_phase(loaded, resolved, each, **options) for each in phases]


def _cut(model: Any, tp: int, experts: ExpertCut) -> dict[str, str]:
    """Cut a model for rank 0 of `tp`, and return how."""
    from core.engine.models.sharding import plan_of, planned, shard_model

    plan, whole = planned(model, tp, experts), _num_parameters(model)
    shard_model(model, plan_of(model, tp, experts))
    share = f"with {_num_parameters(model) / whole:.0%} of the parameters"
    rest = "the others are pretended, so collectives show as reference, whatever a run takes"
    return {"rank": f"0 of {tp}, {share}; {rest}", **plan.facts()}


def _num_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _print(explanation: Explanation, profiles: Sequence[KernelProfile], full: bool, html: Path | None) -> None:
    from core.bench.text import kernel_tables
    from core.explain.text import renderables

    print_items(renderables(explanation, full=full))
    print_items(item for profile in profiles for item in kernel_tables(profile.to_json()))
    if html is not None:
        print_items([f"\nwritten: {html} ({html.stat().st_size / 2**20:.2f} MiB)"])
