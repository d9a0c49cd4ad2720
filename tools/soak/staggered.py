"""Requests that come and go on one engine, drawn by a seed, and what became of each against the model by itself.

Shared by `soak_models.py` and by the tests of models that are served in a way of their own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.http.load import load_of
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig

LENGTHS = (1, 2, 3, 7, 16, 17, 33, 40)
"""Tokens of prompts: around blocks of 8 and steps of 16, and up to three of such steps."""
MAX_LEN = 64
TIGHT = EngineConfig(
    max_num_seqs=4,
    max_model_len=MAX_LEN,
    block_size=8,
    cache_tokens=MAX_LEN + 16,
    decode_buckets=(2, 4),
    prefill_buckets=(16,),
    max_step_tokens=16,
    sampling=("greedy",),
    options=CompileOptions(lowering="inline"),
)
"""Room for little more than one sequence of the longest context, and prompts of up to three chunks."""
_FIRST, _LAST = 3, 160
"""Token ids: above those with a meaning, and within the tiny models' vocabulary."""
_MAX_STEPS = 20_000


@dataclass(kw_only=True)
class Job:
    """A prompt, the model's own tokens, and what the engine gave."""

    prompt: list[int]
    own: list[int]
    #: After how many tokens it is aborted; None for never.
    aborted: int | None = None
    tokens: list[int] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def fault(self) -> str:
        """What is wrong with the outcome; "" where nothing is."""
        reason = "none" if self.completion is None else self.completion.finish_reason
        whole = reason == "length" and len(self.tokens) == len(self.own)
        if not whole and not (reason == "abort" and self.aborted is not None):
            return f"{len(self.tokens)} of {len(self.own)} tokens, and then {reason}"
        pairs = zip(self.tokens, self.own, strict=False)
        place = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if place is None:
            return ""
        return f"token {place} behind a prompt of {len(self.prompt)} is {self.tokens[place]}, not {self.own[place]}"


def generated(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what transformers' own generation of one prompt gives, greedily."""
    from transformers import GenerationConfig

    how = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        out = model.generate(torch.tensor([list(prompt)], device=model.device), generation_config=how)
    return list(out[0, len(prompt) :].tolist())


def draw_jobs(model: Any, count: int, *, seed: int = 5, beginnings: int = 0, max_len: int = 64) -> list[Job]:
    """Return requests with the model's own tokens; a sixth of them are to be aborted. The model must be nobody's yet.

    beginnings: so many texts, with which half of the prompts begin. max_len: of prompts and tokens together.
    """
    rng = random.Random(seed)
    shared = [[rng.randrange(_FIRST, _LAST) for _ in range(rng.randint(17, 26))] for _ in range(beginnings)]
    jobs = []
    for _ in range(count):
        prompt = [rng.randrange(_FIRST, _LAST) for _ in range(rng.choice(LENGTHS))]
        if shared and rng.random() < 0.5:
            prompt = [*rng.choice(shared), *prompt[: rng.randint(1, 12)]]
        own = generated(model, prompt, rng.randint(1, min(20, max_len - len(prompt))))
        jobs.append(Job(prompt=prompt, own=own, aborted=rng.randrange(len(own)) if rng.random() < 1 / 6 else None))
    return jobs


def serve(engine: Engine, jobs: Sequence[Job], *, seed: int = 1) -> None:
    """Add the jobs a few at a time while the engine runs, and abort some: those with no token as soon as they came.

    Raises `RuntimeError` where a request is never done.
    """
    rng, coming, running = random.Random(seed), list(jobs), dict[int, Job]()
    for _ in range(_MAX_STEPS):
        if not coming and not engine.has_unfinished:
            return
        for _ in range(rng.choice([0, 0, 0, 1, 2, 4])):
            if coming:
                job = coming.pop(0)
                params = SamplingParams(max_new_tokens=len(job.own), ignore_eos=True)
                running[engine.add_request(job.prompt, params)] = job
        for output in engine.step():
            running[output.request_id].tokens += output.token_ids
            running[output.request_id].completion = output.completion
        for request, job in running.items():
            if job.completion is None and job.aborted is not None and len(job.tokens) >= job.aborted:
                job.completion = engine.abort(request)
    raise RuntimeError(f"{_MAX_STEPS} steps, and requests are not done")


def _no_row_shared(engine: Engine) -> str:
    return "one sequence at a time" if "one sequence at a time" in engine.route_reason else ""


def _not_static(engine: Engine) -> str:
    return "a row has the whole context, and a prompt runs whole" if engine.route == "static" else ""


def _no_states(engine: Engine) -> str:
    if engine.route == "static":
        return "rows share nothing, and take nothing back"
    return "a state can be neither shared nor taken back" if "recurrent states" in engine.route_reason else ""


EVENTS: Mapping[str, Callable[[Engine], str]] = MappingProxyType(
    {
        "finished": lambda _: "",
        "aborted": lambda _: "",
        "mixed": _no_row_shared,
        "preempted": _not_static,
        "chunked": _not_static,
        "prefix hits": _no_states,
        "accepted": _no_states,
        "rejected": _no_states,
    }
)
"""What has to happen in a run with drafts, shared beginnings and a small cache -> why it can't on an engine's route, ""
where it has to."""


def counted(engine: Engine, jobs: Sequence[Job]) -> Counter[str]:
    """Return how often each of `EVENTS` happened in the only run of an engine."""
    stats = engine.stats()
    drafted, accepted = sum(stats.drafted.values()), sum(stats.accepted.values())
    reasons = Counter(job.completion.finish_reason for job in jobs if job.completion is not None)
    hits = sum(bool(job.completion.num_cached_tokens) for job in jobs if job.completion is not None)
    return Counter(
        {
            "finished": reasons["length"],
            "aborted": reasons["abort"],
            "mixed": stats.mixed_steps,
            "preempted": stats.preempted,
            "chunked": stats.chunked,
            "prefix hits": hits,
            "accepted": accepted,
            "rejected": drafted - accepted,
        }
    )


def faults(engine: Engine, jobs: Sequence[Job]) -> list[str]:
    """Return what is wrong after the only run of an engine: tokens, events that never came, blocks nobody gave back."""
    events = counted(engine, jobs)
    found = [f"request {index}: {job.fault}" for index, job in enumerate(jobs) if job.fault]
    found += [f"never: {event}" for event, why_not in EVENTS.items() if not events[event] and not why_not(engine)]
    found += [
        f"{events[event]} {event}: {why}" for event, of in EVENTS.items() if events[event] and (why := of(engine))
    ]
    load = load_of(engine)
    if load.running or load.waiting or load.used_blocks:
        found.append(f"at rest, {load.running} run, {load.waiting} wait, and {load.used_blocks} blocks are taken")
    return found
