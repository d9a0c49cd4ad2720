"""Loads of requests: what is drawn, what is measured, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.bench.load import Load, load_of, parse_lengths, run_load, write_timeline
from core.compilation.options import CompileOptions
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError
from tests.recording import acme

LOAD = Load(num_requests=9, prompt_tokens="2:20", output_tokens="3:9")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32)
    config = EngineConfig(
        max_num_seqs=4,
        max_model_len=32,
        decode_buckets=(4,),
        prefill_buckets=(8, 32),
        run_ahead=True,
        sampling=("greedy",),
        options=CompileOptions(lowering="inline"),
    )
    with Engine(loaded, acme(), config) as engine:
        yield engine


def test_the_same_seed_draws_the_same_requests() -> None:
    requests = LOAD.requests(vocab_size=50, max_model_len=32)
    assert requests == LOAD.requests(vocab_size=50, max_model_len=32)
    assert requests != replace(LOAD, seed=1).requests(vocab_size=50, max_model_len=32)
    assert all(2 <= len(each.prompt) <= 20 and 3 <= each.max_new_tokens <= 9 for each in requests)
    assert {each.arrives_s for each in requests} == {0.0}


def test_lengths_end_where_the_context_does() -> None:
    long = Load(num_requests=5, prompt_tokens="500", output_tokens="lognormal:9:1")
    for each in long.requests(vocab_size=50, max_model_len=32):
        assert (len(each.prompt), each.max_new_tokens, each.cut) == (31, 1, True)
    fits = Load(num_requests=5, prompt_tokens="20", output_tokens="12")
    assert not any(each.cut for each in fits.requests(vocab_size=50, max_model_len=32))
    assert all(each.cut for each in fits.requests(vocab_size=50, max_model_len=31))


def test_requests_come_at_the_rate_on_average() -> None:
    load = replace(LOAD, num_requests=2000, rate=50.0)
    last = load.requests(vocab_size=50, max_model_len=32)[-1].arrives_s
    assert 2000 / 50 * 0.9 < last < 2000 / 50 * 1.1


@pytest.mark.parametrize(("text", "least", "most"), [("7", 7, 7), ("3:5", 3, 5), ("lognormal:0:0", 1, 1)])
def test_lengths_are_drawn_from_what_is_written(text: str, least: int, most: int) -> None:
    draw, rng = parse_lengths("--prompt-tokens", text), random.Random(0)
    drawn = {draw(rng) for _ in range(200)}
    assert min(drawn) == least and max(drawn) == most


@pytest.mark.parametrize("text", ["", "0", "5:3", "a", "1:2:3", "lognormal:1", "lognormal:nan:1", "lognormal:99:1"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="lengths are written"):
        parse_lengths("--prompt-tokens", text)


@pytest.mark.parametrize(("count", "rate"), [(0, None), (4, 0.0), (4, float("nan")), (4, -1.0)])
def test_a_load_without_requests_or_with_no_rate_is_refused(count: int, rate: float | None) -> None:
    with pytest.raises(UsageError):
        load_of(count, "8", "8", rate)


def test_a_load_is_served_and_every_token_counted(engine: Engine, tmp_path: Path) -> None:
    requests = LOAD.requests(vocab_size=engine.loaded.vocab_size, max_model_len=engine.max_model_len)
    with engine.timeline() as timeline:
        report = run_load(engine, LOAD)
    assert report.output_tokens == sum(each.max_new_tokens for each in requests)
    assert report.prompt_tokens == sum(len(each.prompt) for each in requests)
    assert report.counts["joined"] == report.counts["ended"] == len(requests)
    assert set(report.counts["steps"]) == {"prefill", "decode"} and not report.fallbacks
    assert report.counts["padded"] > 0
    assert report.first_token_s[50] <= report.first_token_s[99] <= report.seconds
    found = report.to_json()
    assert json.loads(json.dumps(found))["between_tokens_s"].keys() == {"p50", "p95", "p99"}
    write_timeline(timeline, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    waits = [each for each in events if each["name"] == "wait"]
    assert len(waits) == sum(report.counts["steps"].values())
    assert all(each["dur"] >= 0 and each["args"]["tokens"] > 0 for each in waits)


def test_no_timeline_is_kept_after_its_block(engine: Engine) -> None:
    with engine.timeline() as timeline:
        pass
    run_load(engine, replace(LOAD, num_requests=1))
    assert not timeline
