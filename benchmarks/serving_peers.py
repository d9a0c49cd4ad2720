"""Serve one drawn load by `core`, by transformers' continuous batching and by `generate`, in turns on the same weights.

    python benchmarks/serving_peers.py [--preset tiny|100m] [--requests 48] [--rounds 3] [--lowering NAME] [--json FILE]

Greedy, without end-of-sequence, so that everybody generates the same number of tokens; how many of them are equal to
`core`'s is counted, since in different batches near-ties fall either way. `generate` takes one prompt at a time, as
`generate` with padding computes each row to the length of the longest. Starting, loading and compiling are not timed.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig

import core
from core.bench.load import Load, Request
from core.compilation.options import CompileOptions
from core.engine.models.assets import embedded_model
from core.engine.models.loading import LoadedModel, build_model, load_model

Tokens = list[list[int]]


def model_of(preset: str) -> LoadedModel:
    """Return the embedded model in fp32, or a Llama of 100 M random parameters in bf16."""
    cpu = torch.device("cpu")
    if preset == "tiny":
        return load_model(embedded_model(), torch_device=cpu, dtype=torch.float32)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=16_384,
        max_position_embeddings=2048,
    )
    return build_model(config, torch_device=cpu, dtype=torch.bfloat16)


def _copy(loaded: LoadedModel, preset: str) -> Any:
    model = model_of(preset).model
    model.load_state_dict(loaded.model.state_dict())
    return model


def by_core(engine: core.Engine, load: list[Request]) -> Tokens:
    """Generate all at once."""
    each = [core.SamplingParams(max_new_tokens=one.max_new_tokens, ignore_eos=True) for one in load]
    return [list(done.token_ids) for done in engine.generate([one.prompt for one in load], each)]


def by_continuous_batching(manager: Any, load: list[Request]) -> Tokens:
    """Generate all at once through a manager that runs."""
    names = [manager.add_request(one.prompt, max_new_tokens=one.max_new_tokens) for one in load]
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching has ended early")
    return [found[name] for name in names]


def by_generate(model: Any, load: list[Request]) -> Tokens:
    """Generate one after the other."""
    found = []
    for one in load:
        ids = torch.tensor([one.prompt])
        config = GenerationConfig(max_new_tokens=one.max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        found.append(out[0, len(one.prompt) :].tolist())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("tiny", "100m"), default="tiny")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-tokens", default="16:128")
    parser.add_argument("--output-tokens", default="16:64")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lowering", default=None)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    for name in ("core", "transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)

    loaded = model_of(asked.preset)
    other, plain = (_copy(loaded, asked.preset) for _ in range(2))
    length = 256
    drawn = Load(
        num_requests=asked.requests, prompt_tokens=asked.prompt_tokens, output_tokens=asked.output_tokens
    ).requests(vocab_size=int(other.config.vocab_size), max_model_len=length)
    config = core.EngineConfig(
        max_num_seqs=asked.max_num_seqs,
        max_model_len=length,
        sampling=("greedy",),
        options=CompileOptions(lowering=asked.lowering),
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=length)
    blocks = asked.max_num_seqs * (length // 32 + 1)
    batching = ContinuousBatchingConfig(block_size=32, num_blocks=blocks, max_batch_tokens=512)
    with core.Engine(loaded, core.select_device("cpu"), config) as engine:
        manager = other.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
        manager.start()
        ways: dict[str, Callable[[], Tokens]] = {
            "core": lambda: by_core(engine, drawn),
            "continuous batching": lambda: by_continuous_batching(manager, drawn),
            "generate": lambda: by_generate(plain, drawn),
        }
        report = measured(ways, asked.rounds)
        manager.stop(block=True)
    report |= {
        "preset": asked.preset,
        "requests": asked.requests,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "core": core.__version__},
        "processor": platform.processor() or platform.machine(),
    }
    print(json.dumps(report, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measured(ways: dict[str, Callable[[], Tokens]], rounds: int) -> dict[str, Any]:
    """Run each way once unmeasured, then in turns; return seconds, ratios to core's, and the share of equal tokens."""
    tokens = {name: run() for name, run in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    count = sum(map(len, tokens["core"]))
    found: dict[str, Any] = {"generated_tokens": count}
    for name, seconds in times.items():
        ratios = [one / reference for one, reference in zip(seconds, times["core"], strict=True)]
        same = sum(
            a == b
            for mine, own in zip(tokens[name], tokens["core"], strict=True)
            for a, b in zip(mine, own, strict=True)
        )
        found[name] = {
            "s": [round(value, 3) for value in seconds],
            "tokens_per_s": round(count / statistics.median(seconds), 1),
            "times_core_s": round(statistics.median(ratios), 2),
            "equal_tokens": round(same / count, 4),
        }
    return found


if __name__ == "__main__":
    main()
