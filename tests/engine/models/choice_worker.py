"""One of several processes with a part of the vocabulary each: what they choose is what one process chooses."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
from torch import Tensor

import core
from core.common.ops.collective.collectives import group_size
from core.engine.config import SamplingParams
from core.engine.models.distributed import initialize
from core.engine.models.loading import build_model
from core.engine.models.sharding import ExpertCut, plan_of, shard_model
from core.engine.models.sharding.gathering import argmax_of_parts
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from tests.recording import acme

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [20, 21, 22]]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=6, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.9, top_k=20, top_p=0.9, seed=7),
    "biased": SamplingParams(max_new_tokens=6, ignore_eos=True, logit_bias=((5, 2.5), (150, 3.0))),
    "penalised": SamplingParams(max_new_tokens=6, ignore_eos=True, repetition_penalty=1.7, presence_penalty=0.5),
    "told": SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=3),
}


def rows() -> dict[str, Tensor]:
    """Return logits (R, 96) with what decides between processes: ties, infinities, NaN, and nothing at all."""
    drawn = torch.randn(64, 96, generator=torch.Generator().manual_seed(5))
    tied, masked, broken = (drawn.clone() for _ in range(3))
    tied[:, ::7] = 9.0
    masked[:, :48], masked[0], masked[1, 95] = -torch.inf, -torch.inf, torch.inf
    broken[::2, 50], broken[::3, 2] = torch.nan, torch.nan
    return {"drawn": drawn, "tied": tied, "masked": masked, "broken": broken, "none": drawn[:0]}


def chosen(rank: int, size: int) -> list[str]:
    """Return for which rows and dtypes another token is chosen than by one process."""
    return [
        f"{name} {dtype}"
        for name, logits in rows().items()
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not torch.equal(argmax_of_parts(logits.to(dtype).chunk(size, 1)[rank], ""), logits.to(dtype).argmax(1))
    ]


def adds_by_token(model: Any) -> None:
    """Let a model add to each logit what belongs to its token, so that no part is treated as the whole is."""
    forward = type(model).forward

    @functools.wraps(forward)  # an engine asks what it takes
    def added(self: Any, *args: Any, **named: Any) -> Any:
        output = forward(self, *args, **named)
        output.logits = output.logits + self.of_tokens[: output.logits.shape[-1]]
        return output

    model.register_buffer("of_tokens", torch.linspace(-2.0, 2.0, 160))
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": added})


def generated(
    name: str, device: core.Device, mode: str, *, sharded: bool, sampling: Any, experts: ExpertCut, adds: bool
) -> dict[str, Any]:
    """Return the tokens by parameters, what is told of them, and whether tokens are chosen in parts."""
    loaded = build_model(tiny_config(name), torch_device=torch.device("cpu"), dtype=torch.float32)
    if adds:
        adds_by_token(loaded.model)
    if sharded:
        shard_model(loaded.model, plan_of(loaded.model, group_size(""), experts))
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=32,
        decode_buckets=(2,),
        prefill_buckets=(16,),
        sampling=sampling,
        options=core.CompileOptions(lowering="inline", mode=mode, measure=False),
    )
    with Engine(loaded, device, config) as engine:
        made = {kind: engine.generate(PROMPTS, params, collect_logits=True) for kind, params in PARAMS.items()}
        step = engine._runner._calls["decode"].gather("greedy")
    return {
        "tokens": {kind: [list(each.token_ids) for each in found] for kind, found in made.items()},
        "logits": [each.logits for each in made["greedy"]],
        "logprobs": [torch.tensor([tok.logprob for tok in each.logprobs or ()]) for each in made["told"]],
        "parts": step is not None,
    }


def compared(
    name: str, device: core.Device, mode: str, sampling: Any, experts: ExpertCut = "width", adds: bool = False
) -> dict[str, Any]:
    """Return how an engine on parts differs from one on the whole model. adds: as of `adds_by_token`."""
    how: dict[str, Any] = {"sampling": sampling, "experts": experts, "adds": adds}
    whole, parts = (generated(name, device, mode, sharded=sharded, **how) for sharded in (False, True))
    pairs = [pair for told in ("logits", "logprobs") for pair in zip(whole[told], parts[told], strict=True)]
    return {
        "differ": [kind for kind in PARAMS if whole["tokens"][kind] != parts["tokens"][kind]],
        "near": all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in pairs),
        "parts": [whole["parts"], parts["parts"]],
    }


if __name__ == "__main__":
    place = initialize("gloo", timeout_s=120)
    cpu, recording = core.select_device("cpu"), acme()
    results: dict[str, Any] = {"chosen": chosen(place.rank, place.size)}
    known: dict[str, tuple[Any, ...]] = {
        "llama cpu": ("llama", cpu, "compile", ("greedy",)),
        "llama acme": ("llama", recording, "full", ("greedy", "random")),
        "llama off": ("llama", cpu, "off", ("greedy", "random", "shaped")),
        "gemma2 acme": ("gemma2", recording, "piecewise", ("greedy",)),
        "qwen3_moe acme": ("qwen3_moe", recording, "full", ("greedy",), "number"),
        "adds": ("llama", recording, "full", ("greedy",), "width", True),
    }
    results |= {name: compared(*known[name]) for name in json.loads(sys.argv[1]) or known}
    sys.stdout.write(f"{json.dumps(results)}\n")
    torch.distributed.destroy_process_group()
