"""Models whose layers keep recurrent states, in the batch: requests come, go, are aborted and preempted, and each gets
the tokens that transformers' own `generate` gives for its prompt alone.

On the recording device, whose graphs replay what was captured and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from core.common.ops.recurrent import tokens
from core.compilation.options import CompileOptions
from core.engine.check.eager import eager_generate
from core.engine.config import SamplingParams
from core.engine.inspect.probe import relative_difference
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.paged import step_states
from core.engine.paged.blocks import FIRST_SLOT
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.engine.steps.step import Flight, Step, StepOutput
from core.errors import ModelError, UsageError
from staggered import MAX_LEN, TIGHT, Job, draw_jobs, generated, serve
from tests.installed import needs_type
from tests.marks import slow_except
from tests.recording import acme
from tests.support import refused

TYPES = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm3",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_next",
    "zamba",
    "zamba2",
    "zaya",
)
EAGER_PROMPTS = {"minimax", "zamba", "zaya"}
"""Models of which a layer computes what no op stands for."""
NUM_REQUESTS = 20
CONFIG = replace(TIGHT, options=CompileOptions(lowering="inline", strict=True))


def build(model_type: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    torch.manual_seed(0)
    needs_type(model_type)
    return build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=dtype)


def check(jobs: list[Job]) -> None:
    assert [fault for job in jobs if (fault := job.fault)] == []


@pytest.mark.parametrize("model_type", slow_except(TYPES, "lfm2"))
def test_each_request_gets_the_tokens_of_generating_alone(model_type: str) -> None:
    loaded = build(model_type)
    jobs = draw_jobs(loaded.model, NUM_REQUESTS)
    with Engine(loaded, acme(), CONFIG) as engine:
        assert engine.route == "paged", engine.route_reason
        assert "recurrent states" in engine.route_reason
        eager = model_type in EAGER_PROMPTS
        assert engine.report().modes == {"decode": "full", "prefill": "off" if eager else "piecewise"}
        assert ("prompts run eagerly" in engine.route_reason) is eager
        serve(engine, jobs)
        stats = engine.stats()
    check(jobs)
    assert stats.preempted > 0 and stats.chunked > 0 and stats.mixed_steps > 0
    assert stats.reused == 0


def limited(least: float, most: float, model_type: str = "zamba2", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Return a model whose state spaces bound their steps by these in prompts."""
    loaded = build(model_type, dtype)
    for module in loaded.model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (least, most)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["mamba2", "nemotron_h", "zamba2"])
def test_steps_are_bounded_in_the_tokens_of_prompts_and_in_no_others(
    monkeypatch: pytest.MonkeyPatch, model_type: str, dtype: torch.dtype
) -> None:
    """Bounds that half of the steps are beyond: chunks of any lengths, of one token too, and generated tokens."""
    loaded = limited(0.7, 1.0, model_type, dtype)
    prompts = [[3 + (7 * place + index) % 150 for place in range(length)] for index, length in enumerate((33, 1, 17))]
    own = [logits_of(loaded.model, prompt, 6) for prompt in prompts]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with Engine(loaded, acme(), CONFIG) as engine:
        assert engine.report().modes["prefill"] == "piecewise"
        given = engine.generate(prompts, params, collect_logits=True)
    bound = 1e-4 if dtype == torch.float32 else 0.05
    for completion, (chosen, logits) in zip(given, own, strict=True):
        assert completion.logits is not None
        assert relative_difference(completion.logits[:1], logits[:1]) < bound
        # Half precision may choose another of two tokens that it can't tell apart.
        assert list(completion.token_ids) == chosen or dtype == torch.bfloat16
    if dtype == torch.float32:
        monkeypatch.setattr(step_states.TokenStates, "taken", unbounded)
        with pytest.raises(UsageError, match="bound steps in prompts alone"):
            Engine(loaded, acme(), CONFIG)


def test_bounds_of_prompts_are_not_lost_where_prompts_have_no_graphs() -> None:
    """transformers' code for one token bounds none: a chunk of one, and tokens computed again, would be wrong."""
    config, why = replace(CONFIG, options=CompileOptions(mode="off")), "no graph of prompts does that here"
    with refused(UsageError, "cache_tokens=80", "Mamba2ForCausalLM has no cache here", why):
        Engine(limited(0.7, 1.0, "mamba2"), acme(), config)
    with refused(ModelError, f"bound steps in prompts alone, and {why}", "its own generation differs"):
        Engine(limited(0.7, 1.0, "mamba2"), acme(), replace(config, cache_tokens=None))


def unbounded(self: step_states.TokenStates, pool: torch.Tensor, *_: float) -> torch.Tensor:
    stated: torch.Tensor = tokens.READ(pool, self.slots, self.query_starts, self.num_rows)
    return stated


def logits_of(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return tokens and logits of a prompt generated by the model alone."""
    with torch.no_grad():
        chosen, logits = eager_generate(model, [prompt], count, positions=True)
    return chosen[0], logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("phase", slow_except(["prefill", "decode"], "decode"))
def test_a_step_that_fails_after_it_moved_states_is_computed_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    loaded = build("lfm2")
    jobs = draw_jobs(loaded.model, 3)
    for job in jobs:
        job.aborted = None
    with Engine(loaded, acme(), replace(CONFIG, decode_steps=1, decode_buckets=(4,))) as engine:
        run_step, failed = engine._runner.run, list[str]()

        def run_and_fail(step: Step, behind: Flight | None = None) -> StepOutput | None:
            output = run_step(step, behind)
            if step.phase == phase and len(step.parts) > 1 and len(failed) < 2:
                failed.append(step.phase)
                raise RuntimeError("planted")
            return output

        monkeypatch.setattr(engine._runner, "run", run_and_fail)
        ids = {
            engine.add_request(j.prompt, SamplingParams(max_new_tokens=len(j.own), ignore_eos=True)): j for j in jobs
        }
        while engine.has_unfinished:
            try:
                outputs = engine.step()
            except RuntimeError:
                continue
            for output in outputs:
                ids[output.request_id].tokens += output.token_ids
                ids[output.request_id].completion = output.completion
    assert failed == [phase] * 2
    check(jobs)


@pytest.mark.slow
def test_a_padded_row_that_wrote_to_a_sequence_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build("lfm2")
    prompts = [[3, 4, 5], [6, 7, 8], [9, 10, 11]]  # three rows in a bucket of four
    own = [generated(loaded.model, prompt, 8) for prompt in prompts]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    found = []
    for slot in (step_states.DROPPED_SLOT, FIRST_SLOT):
        monkeypatch.setattr(step_states, "DROPPED_SLOT", slot)
        with Engine(loaded, acme(), replace(CONFIG, decode_steps=1, decode_buckets=(4,))) as engine:
            found.append([list(each.token_ids) for each in engine.generate(prompts, params)])
    assert found[0] == own and found[1] != own


@pytest.mark.slow  # what has no state is queued ahead by make test: test_run_ahead.py
def test_steps_are_queued_ahead_of_the_host() -> None:
    loaded = build("lfm2")
    jobs = draw_jobs(loaded.model, 5)
    with Engine(loaded, acme(), replace(CONFIG, run_ahead=True)) as engine:
        serve(engine, jobs)
        assert engine.stats().ahead > 0
    check(jobs)


def test_drafts_and_adapters_are_refused_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    loaded, config = build("lfm2"), replace(CONFIG, options=CompileOptions(mode="off"))
    with Engine(loaded, acme(), replace(config, speculative=2)) as engine:
        assert engine._runner.num_drafts == 0
    assert "a wrong draft can't be taken back" in caplog.text
    with pytest.raises(UsageError, match="leave the draft model out"):
        Engine(loaded, acme(), replace(config, speculative=2, draft_model=build("llama")))
    with pytest.raises(UsageError, match="take another draft model"):
        Engine(build("llama"), acme(), replace(config, speculative=2, draft_model=loaded))
    with pytest.raises(UsageError, match="it keeps recurrent states"):
        Engine(loaded, acme(), replace(config, max_loras=1))


def test_memory_for_states_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, device = build("mamba2"), acme()
    small = EngineConfig(max_num_seqs=2, max_model_len=MAX_LEN, options=CompileOptions(mode="off"))
    sizes = []
    for most in (2, 4):
        with Engine(loaded, device, replace(small, max_num_seqs=most)) as engine:
            sizes.append(engine._runner._paged.num_bytes)
    per_slot = (sizes[1] - sizes[0]) // 2
    assert per_slot > 0 and sizes[0] == 5 * per_slot  # two sequences, one that leaves, and two that no sequence has
