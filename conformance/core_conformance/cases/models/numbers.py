"""Cases of area "models" about numbers: logits, tokens, distributions, and batches whose sequences come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from core.common.numerics import judge_pooled
from core_conformance.cases.models.runs import JOBS, Bench, Followed, agreed, another_engine, follow, serve
from core_conformance.rules.divergence import divergences, judge_divergence, token_slip
from core_conformance.rules.judging import by_t2
from core_conformance.trial import Trial


def logits(trial: Trial, bench: Bench) -> None:
    """Judge the logits of prefill and of decode by T1, and what they are judged by, the device's own eager, by T2."""
    engine, wanted = bench.engine, bench.subject.route
    trial.require(
        engine.route == wanted,
        f"the model runs on the {engine.route} cache instead of the {wanted} one: {engine.route_reason}",
    )
    judge_yardstick(trial, bench)
    judge_rows(trial, bench, "logits of prefill", bench.run, slice(0, 1))
    judge_rows(trial, bench, "logits of decode", bench.run, slice(1, None))
    _note_length(trial, bench.run, bench)


def judge_yardstick(trial: Trial, bench: Bench) -> None:
    """Judge the eager model on the device by the error that it has on the host; area torch finds the cause of a
    failure."""
    made = bench.reference
    eager, host, exact = (torch.cat(rows) for rows in (made.eager, made.host, made.exact))
    by_t2(trial, "logits of transformers' own eager model", eager, host, lambda: exact)


def judge_rows(
    trial: Trial,
    bench: Bench,
    name: str,
    run: Followed,
    rows: slice = slice(None),
    *,
    against: Followed | None = None,
) -> None:
    """Judge the pooled logits of a run along eager's paths by T1. against: a run that replaces the yardstick."""
    counts = [len(tokens) for tokens in run.tokens]
    if against is not None:
        counts = [min(count, len(tokens)) for count, tokens in zip(counts, against.tokens, strict=True)]
    sides = (run.logits, bench.reference.eager if against is None else against.logits, bench.reference.exact)
    pooled = [[side[i][:count][rows] for i, count in enumerate(counts)] for side in sides]
    verdict = judge_pooled(*pooled)
    reason = verdict.reason and f"{verdict.reason}; {_worst(bench, pooled, rows)}; {bench.hint}"
    ratio = max(verdict.rms_ratio, verdict.max_ratio)
    trial.record(name, "T1", ratio if ratio == ratio else math.inf, reason, like=torch.cat(pooled[0]))


def _worst(bench: Bench, pooled: Sequence[Sequence[Tensor]], rows: slice) -> str:
    """Return where the largest error of a run is."""
    errors = [
        ((ours.double() - exact).abs().amax(dim=-1), (theirs.double() - exact).abs().amax(dim=-1))
        for ours, theirs, exact in zip(*pooled, strict=True)
    ]
    prompt = max(range(len(errors)), key=lambda i: float(errors[i][0].max()) if errors[i][0].numel() else -1.0)
    step = int(errors[prompt][0].argmax())
    ours, theirs = (float(side[step]) for side in errors[prompt])
    where = bench.place(prompt, step + (rows.start or 0))
    return f"worst at {where}: {ours:.2g} off fp64, the yardstick {theirs:.2g}"


def tokens(trial: Trial, bench: Bench) -> None:
    """Judge every greedy token by T3."""
    judge_tokens(trial, bench, "tokens", bench.run)
    _note_length(trial, bench.run, bench)


def judge_tokens(trial: Trial, bench: Bench, name: str, run: Followed) -> None:
    """Judge the tokens of a run along eager's paths by T3, and say which one is the first to be wrong."""
    worst, reason, flips = 0.0, "", 0
    for prompt, taken in enumerate(run.tokens):
        for step, token in enumerate(taken):
            ratio, why = token_slip(
                token, run.logits[prompt][step], bench.reference.exact[prompt][step], bench.rounding
            )
            flips += token != bench.reference.paths[prompt][step]
            worst = max(worst, ratio)
            reason = reason or (why and f"{bench.place(prompt, step)}: {why}; {bench.hint}")
    trial.record(name, "T3", worst, reason)
    if flips:
        trial.note(f"{name}: {flips} of {run.num_tokens} differ from eager's; allowed where fp64 sees a tie")


def modes(trial: Trial, bench: Bench) -> None:
    """Judge the logits and tokens of an engine in each mode; where its graphs can't hold the model, note the reason."""
    for mode in (*bench.device.capabilities.modes, "off"):
        with another_engine(bench, mode=mode if mode == "off" else (mode, "off")) as engine:
            run = follow(engine, bench.prompts, bench.reference.paths)
            report = engine.report()
        for phase, found in report.modes.items():
            told = f"{phase} runs {found!r} instead of {mode!r}: {'; '.join(report.notes) or 'no reason is stated'}"
            if found != mode and report.notes:
                trial.note(told)
            else:
                trial.require(found == mode, told)
        judge_tokens(trial, bench, f"tokens, mode {mode}", run)
        judge_rows(trial, bench, f"logits, mode {mode}", run)


def divergence(trial: Trial, bench: Bench) -> None:
    """Judge the distributions over the next token by KL(R||G) against KL(R||E)."""
    counts = [len(taken) for taken in bench.run.tokens]
    sides = (bench.run.logits, bench.reference.eager, bench.reference.exact)
    ours, theirs, exact = (torch.cat([side[i][:n] for i, n in enumerate(counts)]) for side in sides)
    ratio, reason = judge_divergence(ours, theirs, exact)
    if reason:
        row = int(divergences(exact, ours).nan_to_num(math.inf).argmax())
        places = [(prompt, step) for prompt, n in enumerate(counts) for step in range(n)]
        reason = f"{reason}; worst at {bench.place(*places[row])}; {bench.hint}"
    trial.record("KL of next tokens", "T3", ratio, reason, like=ours)


def batch(trial: Trial, bench: Bench) -> None:
    """Serve requests that come and go; each has to get the tokens and logits of running alone."""
    engine, before = bench.engine, bench.engine.stats()
    completions = serve(engine, bench.prompts)
    rows: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    worst, reason = 0.0, ""
    for index, ((_, prompt, count), completion) in enumerate(zip(JOBS, completions, strict=True)):
        found = 0 if completion is None else len(completion.token_ids)
        if not trial.require(found == count, f"request {index}: {found} tokens instead of {count}"):
            continue
        assert completion is not None and completion.logits is not None
        path, exact = bench.reference.paths[prompt], bench.reference.exact[prompt]
        same = agreed(completion.token_ids, path)
        for step in range(same):
            ratio, why = token_slip(completion.token_ids[step], completion.logits[step], exact[step], bench.rounding)
            worst = max(worst, ratio)
            place = f"request {index} of the batch, {bench.place(prompt, step)}"
            reason = reason or (why and f"{place}: {why}{_alone(bench, prompt, step, completion.token_ids[step])}")
        for side, values in zip(rows, (completion.logits, bench.reference.eager[prompt], exact), strict=True):
            side.append(values[:same])
    trial.record("tokens of a batch", "T3", worst, reason)
    if rows[0]:
        verdict = judge_pooled(*rows)
        trial.record("logits of a batch", "T1", max(verdict.rms_ratio, verdict.max_ratio), verdict.reason)
    after = engine.stats()
    num_joined, num_ended = after.joined - before.joined, after.ended - before.ended
    trial.require(num_joined == num_ended, f"{num_joined} requests joined the batch and {num_ended} ended")
    if engine.route == "paged":
        trial.require(after.mixed_steps > before.mixed_steps, "no step held prompts and generating sequences")
        trial.require(after.chunked > 0, "no prompt was computed in chunks")  # now, or when it ran alone
        if not bench.subject.recurrent:  # no state is kept at the end of a block
            trial.require(after.reused > before.reused, "no sequence found its beginning in the cache")


def _alone(bench: Bench, prompt: int, step: int, token: int) -> str:
    alone = bench.run.tokens[prompt][step : step + 1]
    if alone and alone[0] != token:
        return f"; running alone it took {alone[0]}: what else is in the batch, or its padding, leaks in"
    return f"; running alone it took the same; {bench.hint}"


def _note_length(trial: Trial, run: Followed, bench: Bench) -> None:
    wanted = sum(map(len, bench.reference.paths))
    if run.num_tokens < wanted:
        trial.note(f"{run.num_tokens} of {wanted} steps compared: generation left eager's path too often")
