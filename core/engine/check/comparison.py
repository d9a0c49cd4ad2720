"""Checking a run against transformers' own eager model: speed side by side, tokens, and logits against fp64."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.numerics import Fp64Mode, Verdict, judge_pooled
from core.device import Device
from core.engine.check.quantized import widened
from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.inspect.cache_codes import judge_rounded
from core.engine.inspect.probe import Caching, counts_from_zero, function_bound, relative_difference
from core.engine.models.forward import accepted_arguments
from core.engine.serve.engine import Engine

MAX_ORACLE_PARAMETERS = 500_000_000
"""Above this an fp64 copy on the host takes more memory and time than a run should; ask for it explicitly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The outcome. Speeds are generated tokens per second over whole generations, medians of interleaved rounds.

    tokens_equal: all greedy tokens equal. mismatch: the first difference, with whether fp64 allows it (its top-2 margin
    is below the logits' error there), None where there is no fp64 reference to ask. verdict: T1 of the compiled logits,
    None with `skipped` saying why.

    Of an engine with a quantised cache, tokens and logits are compared with eager's on transformers' cache of the same
    codes. cache_rounding: what these cost, the relative difference that they make to the fp64 logits.
    """

    num_tokens: int
    rounds: int
    eager_tokens_per_s: float
    compiled_tokens_per_s: float
    tokens_equal: bool
    mismatch: str
    mismatch_allowed: bool | None
    verdict: Verdict | None
    skipped: str = ""
    cache_rounding: float | None = None

    @property
    def passed(self) -> bool:
        """Tokens are equal (or their difference is allowed) and T1 holds where it was judged."""
        return (self.tokens_equal or self.mismatch_allowed is not False) and (
            self.verdict is None or self.verdict.passed
        )


@torch.no_grad()
def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 32,
    rounds: int = 3,
    oracle: bool | None = None,
    attention: str | None = None,
) -> Comparison:
    """Generate greedily by both, in turns, and judge.

    oracle: compute the fp64 reference; None does so up to `MAX_ORACLE_PARAMETERS`. attention: transformers'
    implementation for the eager side, None for the one the model came with.
    """
    attention = attention or engine.native_attention
    run = _run_both(engine, prompts, num_tokens, rounds, attention)
    verdict, skipped, references, rounding = None, "", None, None
    if oracle or (oracle is None and engine.loaded.num_parameters <= MAX_ORACLE_PARAMETERS):
        model, codes = engine.loaded.model, engine.cache_rounding
        references = plain = fp64_logits(model, prompts, run.eager_tokens, attention)
        if codes is not None:
            references = fp64_logits(model, prompts, run.eager_tokens, attention, codes.caching)
            rounding = relative_difference(torch.cat(references), torch.cat(plain))
        again = partial(fp64_logits, model, prompts, run.eager_tokens, attention)
        verdict, skipped = _judge(engine, run, plain, references, again)
    else:
        skipped = f"no fp64 reference for {engine.loaded.num_parameters / 1e9:.1f} billion parameters unless asked for"
    mismatch, allowed = _mismatch(run.tokens, run.eager_tokens, run.logits, references)
    total = len(prompts) * num_tokens
    return Comparison(
        num_tokens=total,
        rounds=rounds,
        eager_tokens_per_s=total / run.eager_s,
        compiled_tokens_per_s=total / run.compiled_s,
        tokens_equal=not mismatch,
        mismatch=mismatch,
        mismatch_allowed=allowed,
        verdict=verdict,
        skipped=skipped,
        cache_rounding=rounding,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Tokens and logits of both sides, per prompt, and the median seconds of their generations.

    plain_logits: eager's on the same tokens without a cache, where keys and values are not rounded to codes.
    """

    tokens: list[list[int]]
    logits: list[Tensor]
    eager_tokens: list[list[int]]
    eager_logits: list[Tensor]
    plain_logits: list[Tensor]
    eager_s: float
    compiled_s: float


def _run_both(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, rounds: int, attention: str) -> _Run:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    model, device = engine.loaded.model, engine.device
    with implementation(model, attention):
        positions = counts_from_zero(model)
    eager_s, compiled_s = [], []
    for _ in range(rounds + 1):  # the first round warms up
        start = time.perf_counter()
        with implementation(model, attention):
            eager_tokens, eager_logits = eager_generate(model, device, prompts, num_tokens, positions=positions)
        eager_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        completions = engine.generate(list(prompts), params, collect_logits=True)
        device.synchronize()
        compiled_s.append(time.perf_counter() - start)
    codes = engine.cache_rounding
    caching = None if codes is None else codes.caching
    if caching is not None or len(set(map(len, prompts))) > 1:
        # Padding is for speed: not every model keeps it out of its positions and states, so judge by each prompt alone.
        with implementation(model, attention):
            alone = [
                eager_generate(model, device, [p], num_tokens, positions=positions, caching=caching) for p in prompts
            ]
        eager_tokens = [tokens for run in alone for tokens in run[0]]
        eager_logits = [logits for run in alone for logits in run[1]]
    plain_logits = eager_logits
    if caching is not None:
        with implementation(model, attention):
            plain_logits = _logits(model, prompts, eager_tokens)
    return _Run(
        tokens=[list(c.token_ids) for c in completions],
        logits=[c.logits for c in completions if c.logits is not None],
        eager_tokens=eager_tokens,
        eager_logits=eager_logits,
        plain_logits=plain_logits,
        eager_s=statistics.median(eager_s[1:]),
        compiled_s=statistics.median(compiled_s[1:]),
    )


def _judge(
    engine: Engine, run: _Run, plain: list[Tensor], references: list[Tensor], again: Callable[[], list[Tensor]]
) -> tuple[Verdict | None, str]:
    """Return the verdict on the logits with equal history, or None and the reason why there is none.

    plain, references: in fp64, without and with the codes of a quantised cache; the same where there are none. again:
    computes `plain` anew, for the yardstick of a quantised model.
    """
    agreed = [_agreed(ours, theirs) for ours, theirs in zip(run.tokens, run.eager_tokens, strict=True)]
    result, eager, exact, reference = (
        [logits[:count] for logits, count in zip(side, agreed, strict=True)]
        for side in (run.logits, run.plain_logits, plain, references)
    )
    off = relative_difference(torch.cat(eager), torch.cat(exact))
    if off <= function_bound(engine.loaded.model):
        whole = widened(engine.loaded.model, run.plain_logits, plain, again)
        eager = [logits[:count] for logits, count in zip(whole, agreed, strict=True)]
        codes = engine.cache_rounding
        if codes is not None:
            return judge_rounded(result, eager, exact, reference, codes.dtype), ""
        return judge_pooled(result, eager, reference), ""
    # A bound made of such an error would let anything pass.
    return None, f"eager generation itself differs from the fp64 forward by {off:.2g}: another function, not rounding"


def eager_generate(
    model: Any,
    device: Device,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    positions: bool,
    caching: Caching | None = None,
) -> tuple[list[list[int]], list[Tensor]]:
    """Generate greedily by the model's own forward and cache, prompts padded on the left, nothing of `core` involved.

    Whatever the forward returns and takes under one name is its cache, at first what `caching` makes, where it is
    given; a model without one computes all tokens anew.
    positions: pass position ids, as `generate` does (`counts_from_zero` tells which models mean the same by them).
    Returns tokens and logits (num_tokens, vocabulary) on the host, per prompt.
    """
    longest = max(map(len, prompts))
    padded = longest != min(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device.torch_device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device.torch_device)
    accepted = accepted_arguments(model)
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    arguments: dict[str, Any] = {"use_cache": True} if caching is None else caching()
    steps, tokens = [], []
    for _ in range(num_tokens):
        if padded:
            arguments["attention_mask"] = mask
        if positions:
            arguments["position_ids"] = counted[:, -ids.shape[1] :]
        output = model(input_ids=ids, return_dict=True, **arguments)
        cache = {name: output[name] for name in accepted & output.keys() if output[name] is not None}
        arguments |= cache
        steps.append(output.logits[:, -1])
        tokens.append(steps[-1].argmax(-1, keepdim=True))
        ids = tokens[-1] if cache else torch.cat([ids, tokens[-1]], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        counted = torch.cat([counted, counted[:, -1:] + 1], dim=1)
    device.synchronize()
    return torch.cat(tokens, dim=1).tolist(), list(torch.stack(steps, dim=1).cpu())


@torch.no_grad()
def fp64_logits(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    attention: str,
    caching: Caching | None = None,
) -> list[Tensor]:
    """Return the fp64 logits (len(tokens[i]), vocabulary) that each token was to be chosen from, computed on the host.

    The model's weights keep the rounding of its dtype; all arithmetic is fp64, casts in the model's code included.
    """
    with Fp64Mode():  # also here: a plain cast to fp64 drops the imaginary part of complex buffers
        oracle = copy.deepcopy(model).to("cpu", torch.float64)
    if hasattr(oracle, "set_experts_implementation"):
        oracle.set_experts_implementation("eager")  # the grouped product of the others has no fp64
    with implementation(oracle, attention), Fp64Mode():
        return _logits(oracle, prompts, tokens, caching)


def _logits(
    model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], caching: Caching | None = None
) -> list[Tensor]:
    """Return the logits on the host that each token was to be chosen from, by one forward per prompt."""
    found = []
    for prompt, generated in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt, *generated[:-1]]], device=next(model.parameters()).device)
        arguments = {"use_cache": False} if caching is None else caching()
        found.append(model(input_ids=ids, return_dict=True, **arguments).logits[0, len(prompt) - 1 :].cpu())
    return found


def _agreed(ours: list[int], theirs: list[int]) -> int:
    """Number of leading steps with equal history: the step of the first difference is still comparable."""
    equal = 0
    while equal < len(ours) and ours[equal] == theirs[equal]:
        equal += 1
    return min(equal + 1, len(ours))


def _mismatch(
    tokens: list[list[int]], eager: list[list[int]], logits: list[Tensor], references: list[Tensor] | None
) -> tuple[str, bool | None]:
    for index, (ours, theirs) in enumerate(zip(tokens, eager, strict=True)):
        if ours == theirs:
            continue
        step = _agreed(ours, theirs) - 1
        text = f"prompt {index}, token {step}: {ours[step]}, eager {theirs[step]}"
        if references is None:
            return text, None
        top = references[index][step].topk(2).values
        margin = float(top[0] - top[1])
        error = float((logits[index][step].double() - references[index][step]).abs().max())
        return f"{text} (fp64 margin {margin:.2g}, logits error {error:.2g})", margin <= 2 * error
    return "", False
