"""State that the cases of one model and dtype share, and the ways in which they run the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.device import Device
from core_conformance.cases.models.zoo import (
    NUM_TOKENS,
    Reference,
    Subject,
    build,
    engine_config,
    prompts_for,
    refer,
)
from core_conformance.cases.passes.witness import Record, watched
from core_conformance.rules.divergence import rounding_bound
from core_conformance.trial import Trial

if TYPE_CHECKING:
    from core.engine.serve.engine import Engine
    from core.engine.serve.request import Completion

MAX_RESTARTS = 4
JOBS = ((0, 2, 12), (0, 0, 5), (1, 3, 9), (2, 1, 12), (3, 0, 12), (6, 3, 12), (6, 2, 3), (9, 1, 7))
"""Requests of a served batch: the step at which each comes, its prompt, how many tokens it wants. Three to four run at
once, so that of the larger bucket a row is padding, and some have to wait."""
ABORTED = (1, 3, 4)
"""One more: the step at which it comes, its prompt, and the step at which it is aborted, its blocks free again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """The output of an engine along given paths, per prompt."""

    #: The tokens it took at each step.
    tokens: list[list[int]]
    #: (n, V), n being NUM_TOKENS, or less if the engine left the path too often.
    logits: list[Tensor]

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.tokens))


@dataclass(kw_only=True, slots=True)
class Bench:
    """State that the cases of one model in one dtype share."""

    device: Device
    subject: Subject
    dtype: str
    seed: int
    prompts: list[list[int]]
    reference: Reference
    rounding: float
    #: The graphs' witness.
    record: Record
    engine: Engine
    #: Each prompt alone, along eager's path.
    run: Followed

    @property
    def hint(self) -> str:
        """Remedies for wrong numbers."""
        model = f" {self.subject.model_type}" if self.subject.model_type else ""
        lowering = self.subject.lowering(self.dtype)
        options = f" --dtype {self.dtype}" + (f" --lowering {lowering}" if lowering else "")
        changed = "".join(f", here with {name}={value!r}" for name, value in self.subject.changes)
        return f"`core bisect{model} --device {self.device.name}{options}` names the pass, op or part at fault{changed}"

    def place(self, prompt: int, step: int) -> str:
        """Return where a row of logits stands, for readers."""
        tokens = self.prompts[prompt]
        shown = ", ".join(map(str, tokens[:4])) + (", …" if len(tokens) > 4 else "")
        phase = "prefill" if step == 0 else "decode"
        return f"prompt {prompt} ({len(tokens)} tokens: {shown}), token {step} ({phase})"


_shared: list[tuple[tuple[Any, ...], Bench | Exception]] = []


def bench(trial: Trial, subject: Subject, dtype: str) -> Bench:
    """Return the shared state of a model's cases, built by the first of them; the state of another model is closed.

    One at a time: neighbouring cases run in one worker, in order. Building that failed fails for each of them.
    """
    key = (id(trial.device), subject.name, dtype, trial.seed)
    if not _shared or _shared[0][0] != key:
        close_shared()
        try:
            found: Bench | Exception = _make(trial.device, subject, dtype, trial.seed)
        except Exception as error:  # a device's code may raise anything
            found = error
        _shared.append((key, found))
    made = _shared[0][1]
    if isinstance(made, Exception):
        raise made
    return made


def close_shared() -> None:
    """Close the engine that neighbouring cases share, if there is one."""
    for _, made in _shared:
        if isinstance(made, Bench):
            made.engine.close()
    _shared.clear()


def _make(device: Device, subject: Subject, dtype: str, seed: int) -> Bench:
    from core.engine.serve.engine import Engine

    loaded = build(subject, device, getattr(torch, dtype), seed)
    prompts = prompts_for(loaded, seed)
    config, record = engine_config(subject, dtype, device), Record()
    num_rows = config.decode_sizes(device.capabilities)[0] if subject.route == "paged" else 1
    reference = refer(loaded, device, prompts, num_rows)
    engine = Engine(loaded, watched(device, record), config)
    try:
        run = follow(engine, prompts, reference.paths)
    except BaseException:
        engine.close()
        raise
    return Bench(
        device=device,
        subject=subject,
        dtype=dtype,
        seed=seed,
        prompts=prompts,
        reference=reference,
        rounding=rounding_bound(torch.cat(reference.eager), torch.cat(reference.exact)),
        record=record,
        engine=engine,
        run=run,
    )


@contextmanager
def another_engine(shared: Bench, record: Record | None = None, **changes: Any) -> Iterator[Engine]:
    """Serve a fresh copy of the same model by an engine of its own. changes: to its compile."""
    from core.engine.serve.engine import Engine

    loaded = build(shared.subject, shared.device, getattr(torch, shared.dtype), shared.seed)
    device = shared.device if record is None else watched(shared.device, record)
    with Engine(loaded, device, engine_config(shared.subject, shared.dtype, shared.device, **changes)) as engine:
        yield engine


def follow(engine: Engine, prompts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Followed:
    """Generate after each prompt alone, step by step beside a path; where a token leaves it, begin anew behind it.

    So an equally good token (a tie by rounding) does not hide errors after it.
    """
    from core.engine.config import SamplingParams

    tokens: list[list[int]] = []
    logits: list[Tensor] = []
    for prompt, path in zip(prompts, paths, strict=True):
        taken, rows = list[int](), list[Tensor]()
        for _ in range(1 + MAX_RESTARTS):
            params = SamplingParams(max_new_tokens=len(path) - len(taken), ignore_eos=True)
            (completion,) = engine.generate([[*prompt, *path[: len(taken)]]], params, collect_logits=True)
            count = agreed(completion.token_ids, path[len(taken) :])
            assert completion.logits is not None
            taken += completion.token_ids[:count]
            rows.append(completion.logits[:count])
            if len(taken) == len(path):
                break
        tokens.append(taken)
        logits.append(torch.cat(rows))
    return Followed(tokens=tokens, logits=logits)


def agreed(tokens: Sequence[int], path: Sequence[int]) -> int:
    """Return the number of leading tokens with equal history: the first that differs is the last of them."""
    count = 0
    while count < min(len(tokens), len(path)) and tokens[count] == path[count]:
        count += 1
    return min(count + 1, len(tokens), len(path))


def serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Completion | None]:
    """Run `JOBS` as they come and go, one of `ABORTED` among them, and return their completions; None for one lost."""
    from core.engine.config import SamplingParams

    def add(prompt: int, count: int) -> int:
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        return engine.add_request(list(prompts[prompt]), params, collect_logits=True)

    done: dict[int, Completion] = {}
    ids: dict[int, int] = {}
    extra, step = -1, 0
    try:
        while step <= max(job[0] for job in JOBS) or engine.has_unfinished:
            for index, (arrival, prompt, count) in enumerate(JOBS):
                if arrival == step:
                    ids[index] = add(prompt, count)
            if step == ABORTED[0]:
                extra = add(ABORTED[1], NUM_TOKENS)
            if step == ABORTED[2]:
                engine.abort(extra)
            done |= {output.request_id: output.completion for output in engine.step() if output.completion is not None}
            step += 1
    finally:
        for request in (*ids.values(), *([extra] if extra >= 0 else [])):
            engine.abort(request)
    return [done.get(ids[index]) for index in range(len(JOBS))]
