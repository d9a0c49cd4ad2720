"""Run every causal language model of transformers, tiny and with random weights, through the engine, and report.

`tools/sweep_architectures.py --report docs/architectures.md` writes the report. Each model type runs in a worker
process that is started anew after a crash or a time-out. Results go to a file of JSON lines as they come; types that
have a line for the installed versions are not run again unless asked for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from documentation.pages import escaped, table
from sweeping import Result, Worker, one_line, read_results, sweep, versions

NUM_TOKENS = 16
BATCHED = "{}, batched"
# The first is longer than the tiny models' attention window, and the generation leaves it behind in both.
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])


def answer(request: Mapping[str, str]) -> Result:
    """Be a worker of the sweep: examine one type on one device."""
    from core.host.selection import select_device

    device = select_device(request["device"])
    return {**examine(request["type"], device), "lost": loss(device)}


def loss(device: Any) -> str:
    """Return why the device computes nothing any more in this process, "" if it does: as after a failed assertion."""
    import torch

    try:
        torch.ones(1, device=device.torch_device).add_(1)
        device.parts.synchronize()
    except RuntimeError as error:
        return f"the device is lost to the process: {one_line(error)}"
    return ""


def examine(model_type: str, device: Any) -> dict[str, Any]:
    """Build one type, run it, judge it. stage: how far it came (config, build, transformers, engine, check, done)."""
    import torch

    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config

    stage = "config"
    try:
        config = tiny_config(model_type)
        stage = "build"
        loaded = build_model(config, torch_device=device.torch_device, dtype=torch.float32)
        stage = "transformers"
        _run_plain(loaded, device)
        stage = "engine"
        return _judge(loaded, device)
    except Exception as error:
        return {"stage": stage, "error": one_line(error)}


def _run_plain(loaded: Any, device: Any) -> None:
    """Run the model as transformers' users do; what fails or differs here is no matter of the engine.

    A model whose cached generation is another function than its forward would make the criterion's bound meaningless.
    """
    import torch

    from core.engine.check.eager import eager_generate, fp64_logits
    from core.engine.inspect.probe import counts_from_zero

    model = loaded.model
    attention = model.config._attn_implementation
    with torch.no_grad():
        positions = counts_from_zero(model)
        for prompt in PROMPTS:
            tokens, logits = eager_generate(model, [prompt], NUM_TOKENS, positions=positions)
            (expected,) = fp64_logits(model, [prompt], tokens, attention)
            difference = float((logits[0].double() - expected).norm() / expected.norm())
            if not difference < 1e-3:
                raise RuntimeError(f"its generation with a cache differs from its fp64 forward by {difference:.2g}")


def _judge(loaded: Any, device: Any, **options: Any) -> dict[str, Any]:
    from core.compilation.options import CompileOptions
    from core.engine.check.comparison import compare
    from core.engine.http.load import max_running
    from core.engine.serve.engine import Engine
    from core.engine.steps.runner import EngineConfig

    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=64,
        decode_buckets=(2,),
        prefill_buckets=(32,),
        sampling=("greedy",),
        options=CompileOptions(lowering="inline", **options),
    )
    with Engine(loaded, device, config) as engine:
        report = engine.report()
        untraced = " | ".join(textwrap.shorten(note, 300) for note in report.notes if "it can't be" in note)
        facts: dict[str, Any] = {"stage": "check", "route": engine.route, "reason": engine.route_reason}
        facts["batched"] = max_running(engine) > 1
        facts |= {"num_traces": report.num_traces, "modes": dict(report.modes), "untraced": untraced}
        try:
            result = compare(engine, PROMPTS, num_tokens=NUM_TOKENS, rounds=1)
        except Exception as error:
            return {**facts, "error": one_line(error)}
    verdict = result.verdict.to_json() if result.verdict else None
    facts |= {"tokens_equal": result.tokens_equal, "mismatch": result.mismatch, "allowed": result.mismatch_allowed}
    return {**facts, "stage": "done", "verdict": verdict, "passed": result.passed and verdict is not None}


def verdict_of(result: dict[str, Any]) -> str:
    """Name the outcome in one or two words: passed, FAILED, no cache, transformers, not built, not run."""
    stage = result["stage"]
    if stage == "done":
        return "passed" if result["passed"] else "FAILED"
    return {"config": "not built", "build": "not built", "transformers": "transformers fails"}.get(stage, "not run")


def describe(result: dict[str, Any]) -> str:
    """Return one line about a result, for the terminal."""
    parts = [f"{result['type']:24} {verdict_of(result):18}"]
    if "route" in result:
        parts.append(f"{_cache(result)}, {_modes(result)}")
    if result.get("verdict"):
        parts.append(f"T1 {result['verdict']['rms_ratio']:.2f} {result['verdict']['max_ratio']:.2f}")
        parts.append("tokens equal" if result["tokens_equal"] else f"tokens: {result['mismatch']}")
    parts.append(f"{result.get('seconds', 0):.1f} s")
    return "  ".join(parts) + "".join(f"\n    {text}" for text in _reasons(result))


def _reasons(result: dict[str, Any]) -> Iterator[str]:
    if result.get("route", "paged") != "paged":
        yield f"{result['route']}: {result['reason']}"
    if result.get("untraced"):
        yield result["untraced"]
    if result.get("verdict") and result["verdict"]["reason"]:
        yield f"T1: {result['verdict']['reason']}"
    if result.get("error"):
        yield f"{result['stage']}: {result['error']}"


def write_report(path: Path, results: list[dict[str, Any]], device: str) -> None:
    """Write the Markdown table with versions, counts, and one line of reason for whatever is not plain."""
    reasons = (f"- `{r['type']}`: {escaped('; '.join(_reasons(r)))}\n" for r in results if list(_reasons(r)))
    text = f"""\
# Architectures

Written by `tools/sweep_architectures.py --device {device} --report {path.as_posix()}`; do not edit.

Every model type that transformers maps to a causal language model, built tiny with random fp32 weights. The engine
runs each on `{device}` with lowering `inline`: prompts of {len(PROMPTS[0])} and {len(PROMPTS[1])} tokens together,
{NUM_TOKENS} new tokens each. Its tokens are compared with the model's own eager generation of each prompt alone.

T1 is an error divided by its bound: first for the rms error, then for the largest. At most 1 passes. The error is
against an fp64 run without a cache; the bound is made of eager's own error. A model is not judged if its own
generation fails, or differs from its own forward without a cache.

{", ".join(f"{name} {number}" for name, number in versions().items())}

{table(("", "types"), ((name, str(count)) for name, count in _counts(results).items()))}

{table(("type", "outcome", "cache", "modes", "tokens", "T1", "s"), map(_row, results))}

## Reasons

{"".join(reasons)}"""
    path.write_text(text, encoding="utf-8")


def _counts(results: list[dict[str, Any]]) -> dict[str, int]:
    done = [r for r in results if r["stage"] == "done"]
    return {
        "model types": len(results),
        "built tiny": sum(verdict_of(r) != "not built" for r in results),
        "run by transformers": sum(verdict_of(r) not in ("not built", "transformers fails") for r in results),
        "run by the engine": len(done),
        "passed (tokens and criterion T1)": sum(r["passed"] for r in done),
        "on the paged cache": sum(r["route"] == "paged" for r in done),
        "on the static cache": sum(r["route"] == "static" for r in done),
        "of these batched, several sequences at once": sum(_cache(r) == BATCHED.format("static") for r in done),
        "on no cache, all tokens computed again at each step": sum(r["route"] == "recompute" for r in done),
        "of these batched as well": sum(_cache(r) == BATCHED.format("recompute") for r in done),
        "segmented": sum("segmented" in r["modes"].values() for r in done),
        "decode not captured, run eagerly": sum(r["modes"]["decode"] == "off" for r in done),
        "prompts not captured, run eagerly": sum(_prompt_mode(r) == "off" for r in done),
    }


def _cache(result: dict[str, Any]) -> str:
    """Return which cache a result is of; on the paged one, sequences are always batched."""
    route = str(result["route"])
    return BATCHED.format(route) if route != "paged" and result.get("batched") else route


def _prompt_mode(result: dict[str, Any]) -> str:
    """Return how prompts run: as decode does where both are the same, else eagerly unless they have a phase."""
    modes = result["modes"]
    return str(modes["decode"] if result["route"] == "recompute" else modes.get("prefill", "off"))


def _modes(result: dict[str, Any]) -> str:
    """Return the modes of a result's phases, each once."""
    return ", ".join(dict.fromkeys(result["modes"].values()))


def _row(result: dict[str, Any]) -> list[str]:
    verdict, tokens = result.get("verdict"), ""
    if result["stage"] == "done":
        tokens = "equal" if result["tokens_equal"] else "a tie" if result["allowed"] else "differ"
    ratios = f"{verdict['rms_ratio']:.2f}, {verdict['max_ratio']:.2f}" if verdict else ""
    cache, modes = (_cache(result), _modes(result)) if "route" in result else ("", "")
    cells = [f"`{result['type']}`", verdict_of(result), cache, modes, tokens, ratios]
    return [*cells, f"{result.get('seconds', 0):.0f}"]


def main(
    types: list[str] = typer.Argument(None, help="Model types; default: all that transformers has."),
    device: str = typer.Option("cpu", help="Device name, as `core devices` lists it."),
    results: Path = typer.Option(Path(".cache/architectures.jsonl"), help="Where results are kept, one JSON a line."),
    report: Path | None = typer.Option(None, help="Markdown file to write from all results."),
    again: bool = typer.Option(False, help="Run types that have a result for these versions too."),
    timeout_s: float = typer.Option(300.0, help="Most seconds for one type."),
) -> None:
    """Sweep all causal language model types, or those named."""
    from core.engine.models.tiny import causal_lm_types

    key = {"device": device}
    running = Worker(Path(__file__).stem, timeout_s, device=device)
    sweep(running, types or causal_lm_types(), results, key, again=again, describe=describe)
    if report is not None:
        latest = read_results(results, key)
        write_report(report, [latest[name] for name in sorted(latest)], device)


if __name__ == "__main__":
    typer.run(main)
