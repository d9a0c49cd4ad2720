"""A served load: requests of drawn lengths that come at a rate or all at once, and how long each of them waits."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from core.engine.config import SamplingParams
from core.engine.serve.engine import Engine
from core.engine.serve.stepping import Timeline
from core.errors import UsageError

Draw = Callable[[random.Random], int]
_FORMS = "N, FIRST:LAST (all alike likely) or lognormal:MU:SIGMA"
_SHARES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A load of requests; the same seed draws the same requests."""

    num_requests: int
    #: How many tokens a prompt has: `N`, `FIRST:LAST` or `lognormal:MU:SIGMA`.
    prompt_tokens: str
    #: How many tokens are generated for it, drawn alike.
    output_tokens: str
    #: Requests per second, with exponential gaps; None has all of them there at once.
    rate: float | None = None
    seed: int = 0

    def requests(self, *, vocab_size: int, max_model_len: int) -> list[Request]:
        """Draw the requests; their lengths are cut at the context."""
        rng = random.Random(self.seed)
        prompt, output = parse_lengths("--prompt-tokens", self.prompt_tokens), self.output_tokens
        generated, at = parse_lengths("--output-tokens", output), 0.0
        found = []
        for _ in range(self.num_requests):
            drawn = max(1, prompt(rng)), max(1, generated(rng))
            length = min(drawn[0], max_model_len - 1)
            more = min(drawn[1], max_model_len - length)
            at += rng.expovariate(self.rate) if self.rate else 0.0
            cut = (length, more) != drawn
            found.append(Request([rng.randrange(vocab_size) for _ in range(length)], more, at, cut))
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load."""

    prompt: list[int]
    max_new_tokens: int
    #: Its arrival in seconds after the start.
    arrives_s: float
    #: Whether it is shorter than was drawn, since the context ends there.
    cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """The results of a served load. Times in seconds; percentiles keyed by number."""

    load: Load
    seconds: float
    prompt_tokens: int
    output_tokens: int
    #: Longest context, and requests that are shorter than was drawn since they would not fit into it.
    max_model_len: int
    cut: int
    #: From the arrival of a request to its first token.
    first_token_s: dict[int, float]
    #: Between two tokens of a request, over all requests.
    between_tokens_s: dict[int, float]
    #: Steps by phase, and what the engine counted besides.
    counts: dict[str, Any]
    #: Steps that no captured graph served, by phase.
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def output_rate(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return all of it, percentiles as p50 and so on."""
        found = asdict(self)
        for name in ("first_token_s", "between_tokens_s"):
            found[name] = {f"p{share}": value for share, value in found[name].items()}
        return {**found, "output_tokens_per_s": self.output_rate}


def parse_lengths(option: str, text: str) -> Draw:
    """Return a function that draws a length; raise `UsageError` for an unknown form."""
    try:
        if text.startswith("lognormal:"):
            mu, sigma = (float(part) for part in text.removeprefix("lognormal:").split(":"))
            if math.isfinite(mu) and math.isfinite(sigma) and mu <= 20 and 0 <= sigma <= 5:
                return lambda rng: int(rng.lognormvariate(mu, sigma))
        else:
            bounds = [int(part) for part in text.split(":")]
            first, last = bounds if len(bounds) == 2 else (*bounds, *bounds)
            if 1 <= first <= last:
                return lambda rng: rng.randint(first, last)
    except ValueError:
        pass
    raise UsageError(
        f"{option} {text!r}", found=f"lengths are written {_FORMS}", remedy=f"write it like {option} 32:1024"
    )


def load_of(num_requests: int, prompt_tokens: str, output_tokens: str, rate: float | None) -> Load:
    """Return the load that the options describe; raise `UsageError` for invalid options."""
    if num_requests < 1:
        raise UsageError(f"--requests {num_requests}", found="there is nothing to serve", remedy="ask for at least 1")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"--rate {rate}", found="it is no rate above 0", remedy="leave it out for all at once")
    parse_lengths("--prompt-tokens", prompt_tokens)
    parse_lengths("--output-tokens", output_tokens)
    return Load(num_requests=num_requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, rate=rate)


def run_load(engine: Engine, load: Load, *, clock: Callable[[], float] = time.perf_counter) -> LoadReport:
    """Serve a load and return the measurements. Warm the engine before: the first steps of a process are slow."""
    requests = load.requests(vocab_size=engine.loaded.vocab_size, max_model_len=engine.max_model_len)
    before, fallbacks = engine.stats(), Counter(engine.report().fallbacks)
    arrived: dict[int, float] = {}
    first: list[float] = []
    gaps: list[float] = []
    last: dict[int, float] = {}
    generated, coming, start = 0, list(reversed(requests)), clock()
    while coming or engine.has_unfinished:
        now = clock() - start
        while coming and coming[-1].arrives_s <= now:
            each = coming.pop()
            params = SamplingParams(max_new_tokens=each.max_new_tokens, ignore_eos=True)
            arrived[engine.add_request(each.prompt, params)] = each.arrives_s
        if not engine.has_unfinished:
            time.sleep(max(0.0, coming[-1].arrives_s - now))
            continue
        outputs = engine.step()
        now = clock() - start
        for output in outputs:
            generated += len(output.token_ids)
            if output.request_id in last:
                gaps += [(now - last[output.request_id]) / len(output.token_ids)] * len(output.token_ids)
            else:
                first.append(now - arrived[output.request_id])
            last[output.request_id] = now
    seconds = clock() - start
    after = engine.stats()
    counts = {each.name: _less(getattr(after, each.name), getattr(before, each.name)) for each in fields(after)}
    return LoadReport(
        load=load,
        seconds=seconds,
        prompt_tokens=sum(len(each.prompt) for each in requests),
        output_tokens=generated,
        max_model_len=engine.max_model_len,
        cut=sum(each.cut for each in requests),
        first_token_s=_percentiles(first),
        between_tokens_s=_percentiles(gaps),
        counts=counts,
        fallbacks=dict(Counter(engine.report().fallbacks) - fallbacks),
    )


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write what an engine did as trace events, which Perfetto and chrome://tracing open."""
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": 0,
            "tid": 0 if name == "wait" else 1,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": args,
        }
        for name, start, end, args in timeline
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(("waiting for the device", "the host's own work"))
    ]
    path.write_text(json.dumps({"traceEvents": [*names, *events]}), encoding="utf-8")


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return percentiles by nearest rank; empty for no values."""
    ordered = sorted(values)
    return {share: ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] for share in _SHARES} if ordered else {}


def _less(now: Any, before: Any) -> Any:
    return dict(Counter(now) - Counter(before)) if isinstance(now, dict) else now - before
