"""One process of two that run a sharded tiny Llama: prefill and decode, each with the passes off and on."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from torch import Tensor

import core
from core.common.numerics import Fp64Mode, judge
from core.common.ops.canonical import OPS
from core.common.ops.implementation import OpImplementation
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.trace.tracing import trace
from core.engine.config import SamplingParams
from core.engine.models.distributed import initialize
from core.engine.models.loading import build_model
from core.engine.models.sharding import shard_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.static.cache import static_phases
from core.engine.steps.runner import EngineConfig
from core.verify.execution import run_graph
from tests.common.processes import counts
from tests.recording import acme
from tests.support import cpu

FUSIONS = ("sequence_parallel", "fuse_all_reduce_norm", "async_tensor_parallel")
CONFIGURATIONS = {
    "fused": {"disable": ("sequence_parallel", "async_tensor_parallel")},
    "sequence parallel": {"enable": ("sequence_parallel",), "disable": ("async_tensor_parallel",)},
    "asynchronous": {"enable": ("sequence_parallel",)},
}
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10]


def llama(dtype: torch.dtype) -> Any:
    return build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=dtype)


def judged(result: Tensor, eager: Tensor, exact: Tensor) -> dict[str, Any]:
    verdict = judge(result, eager, exact)
    return {"passed": verdict.passed, "reason": verdict.reason, "equal": torch.equal(result, eager)}


def logits_of(dtype: torch.dtype) -> dict[str, Any]:
    """Judge the sharded model against the whole one, and the passes on against off, for each phase."""
    whole = llama(dtype).model
    sharded, wide = shard_model(copy.deepcopy(whole)), copy.deepcopy(whole).double()
    found: dict[str, Any] = {}
    # One token per sequence: two sequences are what decode has to divide.
    for one, phase, exact in zip(*(static_phases(m, num_tokens=4) for m in (whole, sharded, wide)), strict=True):
        with torch.no_grad():
            eager = one.function(**one.inputs)
            with Fp64Mode():
                truth = exact.function(**exact.inputs)
        graph = trace(phase.function, dict(phase.inputs))
        found[phase.name] = rewritten(graph, dict(phase.inputs), eager, truth)
    return found


def rewritten(graph: Any, inputs: dict[str, Tensor], eager: Tensor, exact: Tensor) -> dict[str, Any]:
    values = graph.values(inputs)
    off = Snapshot(graph.module).module()
    PassManager(COMMON_PASSES, strict=True, disable=("merge_linears", *FUSIONS)).run(off)
    before = run_graph(off, values).outputs[0]
    found = {"off": {"judged": judged(before, eager, exact), "counts": {}}}
    for name, switches in CONFIGURATIONS.items():
        module = Snapshot(graph.module).module()
        options = {**switches, "disable": ("merge_linears", *switches.get("disable", ()))}
        reports = PassManager(COMMON_PASSES, strict=True, **options).run(module)
        after = run_graph(module, values).outputs[0]
        fired = {name: count for name, count in counts(reports).items() if name in (*FUSIONS, "lift_collectives")}
        found[name] = {"judged": judged(after, before, exact), "counts": fired}
    return found


def compiled() -> dict[str, Any]:
    """Compile prefill for several numbers of tokens, one of them odd: one trace, for a device that has the ops."""
    model = shard_model(llama(torch.float32).model)
    own = [op for op in OPS if op.is_collective]
    program = core.compile(
        lambda input_ids: model(input_ids=input_ids, use_cache=False).logits,
        cpu(ops=tuple(OpImplementation(op=op.qualified_name, name="own", fn=op.reference) for op in own)),
        inputs={"input_ids": core.InputSpec((1, "tokens"), torch.int64)},
        buckets=[4, 7, 8],
        lowering="inline",
        strict=True,
        options=core.CompileOptions(enable_passes=("sequence_parallel",)),
    )
    prompts = [torch.tensor([PROMPT[:size]]) for size in (3, 6, 8)]
    with torch.no_grad():
        pairs = [(program(input_ids=ids), model(input_ids=ids, use_cache=False).logits) for ids in prompts]
    report, other = program.report().traces
    found = [{name: n for name, n in counts(each.passes).items() if name in FUSIONS} for each in (report, other)]
    return {
        "counts": dict(zip(("even", "odd"), found, strict=True)),
        "served": [sorted(key.dims[0] for key in each.buckets) for each in (report, other)],
        "own": sorted({choice.op for choice in report.ops if choice.implementation == "own"}),
        "equal": [torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in pairs],
    }


MODES: dict[str, tuple[str, Any]] = {
    "cpu compile": ("cpu", "compile"),
    "acme full": ("acme", "full"),
    "acme piecewise": ("acme", "piecewise"),
    "acme segmented": ("acme", "segmented"),
    "acme both": ("acme", {"decode": "full", "prefill": "piecewise"}),
}


def tokens() -> dict[str, Any]:
    """Generate by the engine on the sharded model, in graphs of each mode, and by hand with the whole one."""
    ids = list(PROMPT)
    whole = llama(torch.float32).model
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(whole(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    devices = {"cpu": core.select_device("cpu"), "acme": acme()}
    got = {name: _generated(devices[device], mode) for name, (device, mode) in MODES.items()}
    return {"wanted": ids[len(PROMPT) :], "got": got}


def _generated(device: core.Device, mode: Any) -> list[int]:
    loaded = llama(torch.float32)
    shard_model(loaded.model)
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=16,
        decode_buckets=(2,),
        prefill_buckets=(8,),
        sampling=("greedy",),
        options=core.CompileOptions(lowering="inline", enable_passes=("sequence_parallel",), mode=mode),
    )
    with Engine(loaded, device, config) as engine:
        (result,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=6, ignore_eos=True))
    return list(result.token_ids)


if __name__ == "__main__":
    place = initialize("gloo", timeout_s=120)
    results: dict[str, Any] = {"rank": place.rank, "size": place.size, "local_rank": place.local_rank}
    results |= {str(dtype): logits_of(dtype) for dtype in (torch.float32, torch.bfloat16)}
    results |= {"compiled": compiled()}
    results |= {"tokens": tokens()}
    sys.stdout.write(f"{json.dumps(results)}\n")
    torch.distributed.destroy_process_group()
