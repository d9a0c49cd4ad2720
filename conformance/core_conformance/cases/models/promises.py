"""Cases of area "models" about promises: graphs that are replayed, equal runs, passes that fire, memory given back."""

from __future__ import annotations

import gc

import torch

from core.compilation.options import CompileOptions
from core.compilation.report import ProgramReport
from core_conformance.cases.models.numbers import judge_rows, judge_tokens
from core_conformance.cases.models.runs import Bench, Followed, another_engine, close_shared, follow
from core_conformance.cases.models.zoo import Subject, build
from core_conformance.cases.passes.witness import Record, watched
from core_conformance.rules.tolerances import RELEASE_KEPT, RELEASE_MIN_BYTES
from core_conformance.trial import Trial


def graphs(trial: Trial, bench: Bench) -> None:
    """Generate through graphs, show that they were replayed, and compare with the callables they were captured from."""
    engine, record = bench.engine, bench.record
    before, steps = engine.report(), engine.stats().steps
    record.called.clear()
    captured = follow(engine, bench.prompts, bench.reference.paths)
    report = engine.report()
    _require_modes(trial, bench, report)
    phases = [phase for phase, mode in report.modes.items() if mode != "off"]
    num_steps = sum(engine.stats().steps.get(phase, 0) - steps.get(phase, 0) for phase in phases)
    num_replays = sum(report.replays.values()) - sum(before.replays.values())
    trial.require(num_replays == num_steps > 0, f"{num_steps} steps of {', '.join(phases)}, but {num_replays} replays")
    trial.require(not report.fallbacks, f"steps ran eagerly: {dict(report.fallbacks)}")
    trial.require(not report.compiles, f"compiled while serving: {dict(report.compiles)}")
    again = sorted(str(key) for key in record.called if report.modes[key.phase] != "compile")
    trial.require(not again, f"a replay of {', '.join(again)} ran the Python that was captured instead of a graph")
    if record.callables:
        record.uncaptured = True
        try:
            plain = follow(engine, bench.prompts, bench.reference.paths)
        finally:
            record.uncaptured = False
        _compare(trial, bench, captured, plain, "replayed against the callables themselves")
        return
    trial.note("no key is captured whole: compared with the model as it is, not with the lowered callables")
    with another_engine(bench, mode="off") as other:
        plain = follow(other, bench.prompts, bench.reference.paths)
    judge_tokens(trial, bench, "tokens of replays", captured)
    judge_rows(trial, bench, "logits of replays", captured, against=plain)


def _require_modes(trial: Trial, bench: Bench, report: ProgramReport) -> None:
    """Require the device's preferred modes for the embedded model, and graphs in some mode for every other one.

    Code of a model that no graph can hold (a copy from the host, say) is not the device's fault, as long as the report
    says so. Area graphs tests each mode.
    """
    for phase, mode in report.modes.items():
        wanted = bench.engine.config.modes_of(phase, bench.device.capabilities)[0]
        told = f"{phase} runs {mode!r} instead of {wanted!r}: {'; '.join(report.notes) or 'no reason is stated'}"
        if mode != wanted and report.notes and mode != "off" and bench.subject.model_type is not None:
            trial.note(told)
        else:
            trial.require(mode == wanted, told)


def _compare(trial: Trial, bench: Bench, run: Followed, other: Followed, name: str) -> None:
    """Require equal tokens and bits, or T3 and T1 where the device does not promise them."""
    if not bench.device.capabilities.deterministic or trial.profile.nondeterministic_ops:
        trial.note("the device declares itself, or ops, as not deterministic: compared by T1 and T3")
        judge_tokens(trial, bench, f"tokens, {name}", run)
        judge_rows(trial, bench, f"logits, {name}", run, against=other)
        return
    for prompt, (ours, theirs) in enumerate(zip(run.tokens, other.tokens, strict=True)):
        first = next((step for step, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if first is not None:
            trial.fail(f"{name}: {bench.place(prompt, first)}: {ours[first]} instead of {theirs[first]}")
        rows = min(len(ours), len(theirs))
        trial.same(f"logits after prompt {prompt}, {name}", run.logits[prompt][:rows], other.logits[prompt][:rows])


def determinism(trial: Trial, bench: Bench) -> None:
    """Generate twice, and once more by an engine made anew: equal tokens and equal bits."""
    again = follow(bench.engine, bench.prompts, bench.reference.paths)
    _compare(trial, bench, again, bench.run, "run twice")
    if bench.subject.second and bench.dtype == "float32":
        with another_engine(bench) as engine:
            other = follow(engine, bench.prompts, bench.reference.paths)
        _compare(trial, bench, other, bench.run, "by a second engine")


def passes(trial: Trial, bench: Bench) -> None:
    """Require that the model's expected lifts fired, and compare with the same model without any pass."""
    report = bench.engine.report()
    if not report.traces and report.notes and bench.subject.model_type is not None:
        # As for modes: a model's own code may keep it from being traced where the device captures it in parts.
        trial.note(f"no pass ran, as nothing was traced: {'; '.join(report.notes)}")
        return
    trial.require(bool(report.traces), f"nothing was traced: {'; '.join(report.notes) or 'no reason is stated'}")
    for trace in report.traces:
        reports = {made.name: made for made in trace.passes}
        for made in trace.passes:
            trial.require(not made.error, f"{trace.phase}: pass {made.name} was undone: {made.error}")
            trial.require(
                made.expected is None or bool(made.skipped or made.error) or made.matched == made.expected,
                f"{trace.phase}: pass {made.name} owes {made.expected} matches and made {made.matched}",
            )
        for name in bench.subject.lifts:
            found = reports.get(name)
            if found is not None and found.skipped:
                trial.note(f"{trace.phase}: pass {name} skipped: {found.skipped}")
                continue
            matched = 0 if found is None else found.matched
            why = "; ".join(miss.reason for miss in found.near_misses[:2]) if found is not None else "it did not run"
            trial.require(matched > 0, f"{trace.phase}: pass {name} matched nothing: {why or 'no near-miss'}")
    with another_engine(bench, passes=(), lowering="inline") as engine:
        without = follow(engine, bench.prompts, bench.reference.paths)
    judge_tokens(trial, bench, "tokens with passes", bench.run)
    judge_tokens(trial, bench, "tokens without passes", without)
    judge_rows(trial, bench, "logits without passes", without)
    judge_rows(trial, bench, "logits with passes against without", bench.run, against=without)


LARGE_BATCH, LARGE_LEN = 64, 256
"""Sequences and positions of the engine whose memory is measured: on tiny models a cache of some tens of MiB."""


def release(trial: Trial, subject: Subject, dtype: str) -> None:
    """Close an engine and require that what it took is given back: its tensors, and bytes where the device counts them.

    Twice for the bytes: the first engine may leave workspaces of libraries behind.
    """
    close_shared()
    levels = _open_and_close(trial, subject, dtype)
    if not _counts_tensors(trial):
        trial.note("the device's account does not follow its tensors: judged by the memory that something still holds")
        return
    before, opened, after = _open_and_close(trial, subject, dtype)
    taken, kept = opened - before, after - before
    ratio = max(kept, 0) / (RELEASE_KEPT * max(taken, RELEASE_MIN_BYTES))
    reason = (
        ""
        if ratio <= 1
        else (
            f"of {taken} bytes that an engine took {kept} stay taken after close(); before, with "
            f"and after the first one there were {levels}"
        )
    )
    trial.record("memory kept", "T0", ratio, reason)


def _counts_tensors(trial: Trial) -> bool:
    """Tell whether the account grows by a tensor that nobody has written to.

    An allocator's account does. The resident size of a process does not: it counts what the C library keeps.
    """
    before = _taken(trial)
    block = torch.empty(RELEASE_MIN_BYTES, dtype=torch.uint8, device=trial.device.torch_device)
    grown = _taken(trial) - before
    del block
    return grown >= RELEASE_MIN_BYTES


def _open_and_close(trial: Trial, subject: Subject, dtype: str) -> tuple[int, int, int]:
    """Return the bytes in use on the device before, with, and after an engine."""
    from core.engine.config import SamplingParams
    from core.engine.serve.engine import Engine
    from core.engine.steps.runner import EngineConfig

    device, record = trial.device, Record()
    before = _taken(trial)
    loaded = build(subject, device, getattr(torch, dtype), trial.seed)
    record.keep(loaded.model.parameters())
    sizes = EngineConfig(
        max_num_seqs=LARGE_BATCH,
        max_model_len=LARGE_LEN,
        decode_buckets=(LARGE_BATCH,),
        prefill_buckets=(LARGE_BATCH,),
        sampling=("greedy",),
        options=CompileOptions(lowering="inline"),
    )
    engine = Engine(loaded, watched(device, record), sizes)
    engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    opened = _taken(trial)
    engine.close()
    del engine, loaded
    after = _taken(trial)
    num = len(record.storages)
    trial.require(
        not record.alive,
        f"{record.alive} of {num} memories of weights, static inputs and graphs' outputs are still held after close()",
    )
    return before, opened, after


def _taken(trial: Trial) -> int:
    gc.collect()
    trial.device.synchronize()
    trial.device.parts.empty_cache()
    return trial.device.parts.memory().taken_bytes
