"""Kernels by node: what a call must move, whose time a kernel is, which layers are alike, and a real profile."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import core.common.ops.canonical  # noqa: F401  # declares the ops that are called by name here
from core.bench import rates
from core.bench.kernels import KernelProfile, NodeTime, group_layers, profile_phase
from core.bench.model import open_model
from core.bench.rates import Rates
from core.bench.text import kernel_tables
from core.cli import main
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.steps.inputs import table_names
from core.errors import UsageError
from core.explain.layers import OUTSIDE
from core.explain.moves import moved
from core.explain.step import step_graph
from core.explain.timing import DEVICE, HOST, KernelTime, by_node
from tests.marks import slow_except
from tests.support import cpu, refused

HOST_TYPE = torch._C._autograd.DeviceType.CPU
OTHER_TYPE = torch._C._autograd.DeviceType.PrivateUse1
RATES = Rates(bytes_per_s=1e9, flops_per_s=1e12, copy_bytes=1, matmul_size=1, dtype="float32")


@dataclass
class Event:
    """What `by_node` reads of an event of torch.profiler."""

    name: str
    start: float
    end: float
    device_type: Any = HOST_TYPE
    self_cpu_time_total: float = 0.0
    cpu_children: list[Event] = field(default_factory=list)

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=self.start, end=self.end, elapsed_us=lambda: self.end - self.start)


def test_a_kernel_belongs_to_the_node_in_whose_time_it_began() -> None:
    events = [
        Event("core.node 0 3", 0, 10),
        Event("core.node 0 4", 11, 20),
        Event("core.node 1 3", 30, 40),
        Event("core.node 0 3", 1, 9, OTHER_TYPE),  # the range again, as the device saw it
        Event("gemm", 2, 5, OTHER_TYPE),
        Event("norm", 12, 14, OTHER_TYPE),
        Event("norm", 19, 25, OTHER_TYPE),
        Event("gemm", 31, 35, OTHER_TYPE),
        Event("stray", 26, 27, OTHER_TYPE),
        Event("aten::mm", 1, 2, self_cpu_time_total=7),
    ]
    found, source = by_node(events)
    assert source == DEVICE
    assert found == {(0, 3): [("gemm", 3)], (0, 4): [("norm", 2), ("norm", 6)], (1, 3): [("gemm", 4)]}


def test_on_a_device_without_kernels_of_its_own_the_hosts_ops_count() -> None:
    inner = Event("aten::mm", 2, 4, self_cpu_time_total=2)
    outer = Event("aten::linear", 1, 5, self_cpu_time_total=3, cpu_children=[inner])
    found, source = by_node([Event("core.node 0 0", 0, 9, cpu_children=[outer]), outer, inner])
    assert (found, source) == ({(0, 0): [("aten::linear", 3), ("aten::mm", 2)]}, HOST)


def test_what_a_call_moves() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(5, 8)
    out = x @ weight.T
    found = moved("linear", (x, weight), {}, out)
    assert found.bytes == 4 * (16 + 40 + 10) and found.flops == 2 * 2 * 40
    # A table is read where it is looked up; a broadcast tensor once; what comes out as it went in, not at all.
    ids = torch.zeros(3, dtype=torch.int64)
    table, rows = torch.zeros(1000, 8), torch.zeros(3, 8)
    for name, args in {
        "embedding": (ids, table),
        "aten.embedding.default": (table, ids),
        "getitem": (table, ids),
    }.items():
        assert moved(name, args, {}, rows).bytes == ids.nbytes + 2 * rows.nbytes
    assert moved("embedding", (ids,), {"weight": table}, rows).bytes == ids.nbytes + 2 * rows.nbytes
    assert moved("getitem", (ids, ids[:1]), {}, ids[:1].clone()).bytes == 3 * 8  # a table of integers comes first
    assert moved("mul", (x.new_zeros(1, 8).expand(100, 8), x[:1]), {}, torch.zeros(100, 8)).bytes == 4 * (8 + 8 + 800)
    view = moved(".view", (x, 4, 4), {}, x.view(4, 4))
    assert view.is_view and view.bytes == 0
    assert not moved(".add_", (x, 1), {}, x).is_view


def _attention(seq_lens: list[int], queries: list[int], **options: Any) -> int:
    cache = torch.zeros(10, 16, 2, 4)
    total = queries[-1]
    query, key = torch.zeros(total, 6, 4), torch.zeros(total, 2, 4)
    args = (query, key, key, cache, cache, torch.zeros(2, 5, dtype=torch.int32), torch.zeros(total, dtype=torch.int64))
    lens = (torch.tensor(seq_lens, dtype=torch.int32), torch.tensor(queries, dtype=torch.int32))
    given = moved("core::attention", (*args, *lens), {"scale": 1.0, **options}, query)
    small = sum(t.nbytes for t in (query, key, key, *args[5:], *lens))
    return given.bytes - small - query.nbytes - 2 * key.nbytes  # what is left was read of the caches


def test_attention_reads_of_the_cache_what_the_sequences_hold() -> None:
    position = 2 * 2 * 4 * 4  # key and value of 2 heads of 4
    assert _attention([30, 20], [0, 1, 2]) == (30 + 20 - 2) * position
    assert _attention([30, 3], [0, 1, 2], window=8) == (8 + 3 - 2) * position
    assert _attention([30, 8, 0], [0, 1, 2, 2], window=8, chunked=True) == (6 + 8 - 2) * position
    assert _attention([5, 5], [0, 5, 10]) == 0  # a prompt: all of it is given as keys and values


def test_experts_are_moved_as_far_as_they_are_hit() -> None:
    x, down, gate_up = torch.zeros(3, 8), torch.zeros(16, 8, 4), torch.zeros(16, 8, 8)
    weights, indices = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    found = moved("core::grouped_mlp", (x, weights, indices, gate_up, down), {"kind": "silu"}, x.clone())
    expert = (8 * 4 + 8 * 8) * 4
    assert found.bytes == 6 * expert + 2 * x.nbytes + weights.nbytes + indices.nbytes
    assert found.flops == 2 * 6 * (8 * 4 + 8 * 8)


def _node(path: str, *, kernel: str = "gemm", us: float = 1.0, num_bytes: int = 1000) -> NodeTime:
    kernels = (KernelTime(kernel, 1, us),)
    return NodeTime(
        node="n", op="linear", implementation="", path=path, kernels=kernels, us=us, bytes=num_bytes, flops=0
    )


def test_layers_that_run_the_same_are_one_and_the_rest_stands_apart() -> None:
    nodes = [
        _node("model.embed", us=2),
        *(_node(f"model.layers.{index}.q", us=1 + index) for index in range(4)),
        _node("model.layers.4.q", kernel="other", us=5),
        _node("model.norm", us=1),
    ]
    groups = group_layers(nodes)
    assert [group.name for group in groups] == ["model.layers.0-3", "model.layers.4", OUTSIDE]
    profile = KernelProfile(
        phase="decode", batch=1, tokens=8, cache="paged", source=DEVICE, nodes=tuple(nodes), rates=RATES
    )
    document = json.loads(json.dumps(profile.to_json()))
    layer = document["layers"][0]
    assert (layer["count"], layer["us"], layer["nodes"][0]["path"]) == (4, 2.5, "q")
    assert document["total_us"] == 18 and layer["share"] == pytest.approx(10 / 18)
    assert layer["nodes"][0]["floor_us"] == 1.0 and document["floor_us"] == 7.0  # 1000 bytes at 1 GB/s
    assert sum(each["share"] for each in document["layers"]) == pytest.approx(1.0)
    assert len(list(kernel_tables(document))) == 1 + 3


@pytest.mark.parametrize("phase", slow_except(("decode", "prefill"), "decode"))
def test_a_real_profile_has_a_row_for_each_op_of_a_layer(phase: str) -> None:
    device = cpu(ops=())  # what a machine without a compiler has
    loaded, _ = open_model(None, "tiny-llama", device, "auto")
    profile = profile_phase(loaded, device, phase, batch=2, tokens=24, rates=RATES, repeats=2)
    document = profile.to_json()
    assert (document["source"], document["cache"], document["tokens"]) == (HOST, "paged", 24)
    assert document["batch"] == (2 if phase == "decode" else 1)
    names = [layer["name"] for layer in document["layers"]]
    assert names[-1] == OUTSIDE and all(name.startswith("model.layers.") for name in names[:-1])
    assert sum(layer["count"] for layer in document["layers"][:-1]) == 2
    rows = document["layers"][0]["nodes"]
    by_path = {row["path"]: row for row in rows if row["op"] == "linear"}
    assert {"self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"} <= set(by_path)
    tokens = 2 if phase == "decode" else 24
    assert by_path["mlp.down_proj"]["bytes"] == 4 * (64 * 96 + tokens * (64 + 96))
    assert by_path["mlp.down_proj"]["flops"] == 2 * tokens * 64 * 96
    (attention,) = [row for row in rows if row["op"] == "core::attention"]
    assert attention["implementation"] == "reference" and attention["us"] > 0
    outside = [row["path"] for row in document["layers"][-1]["nodes"]]
    assert "lm_head" in outside and "model.embed_tokens" in outside
    # The model is as it was: another engine may serve it.
    assert loaded.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_kernels_are_those_of_a_quantised_cache_where_it_was_asked_for() -> None:
    loaded, _ = open_model(None, "tiny-llama", cpu(), "auto")
    moved_by = {}
    for kind in ("auto", "fp8"):
        profile = profile_phase(loaded, cpu(), "decode", tokens=24, rates=RATES, repeats=1, kv_cache_dtype=kind)
        moved_by[kind] = sum(node.bytes for node in profile.nodes if "attention" in node.op)
    assert "fp8 codes" in profile.notes[0]
    assert moved_by["fp8"] < moved_by["auto"] / 2
    mamba, _ = open_model("mamba", None, cpu(), "auto")
    with refused(UsageError, "paged cache"):
        profile_phase(mamba, cpu(), "decode", tokens=24, rates=RATES, kv_cache_dtype="fp8")


@pytest.mark.slow
def test_layers_with_a_window_hold_what_it_needs_of_each_sequence() -> None:
    """For those of a whole context the cache of these layers has no room, and a served step holds no more."""
    config = tiny_config("gpt_oss", sliding_window=16)
    loaded = build_model(config, torch_device=torch.device("cpu"), dtype=torch.float32)
    with step_graph(loaded, cpu(ops=()), "decode", batch=32, tokens=240) as step:
        tables = [step.inputs[table_names(group)[0]] for group in range(2)]
        held = sorted(int((table != 0).sum(1).max()) for table in tables)
        assert held[0] <= 16 // 16 + 2 < held[1] == 241 // 16 + 1
        assert bool((step.inputs["seq_lens"] == 241).all())


@pytest.mark.slow
def test_a_step_at_the_last_position_has_room() -> None:
    loaded, _ = open_model(None, "tiny-llama", cpu(), "auto")
    with step_graph(loaded, cpu(ops=()), "decode", batch=8, tokens=511) as step:
        assert step.inputs["seq_lens"].tolist() == [512] * 8


@pytest.mark.slow
def test_a_model_without_paged_cache_is_shown_on_the_static_one() -> None:
    loaded, _ = open_model("codegen", None, cpu(), "auto")
    profile = profile_phase(loaded, cpu(), "decode", tokens=24, rates=RATES, repeats=1)
    assert profile.cache == "static" and "no paged cache" in profile.notes[0] and profile.nodes


def test_sizes_that_are_refused() -> None:
    loaded, _ = open_model(None, "tiny-llama", cpu(), "auto")
    with refused(UsageError, "512 tokens", "512 positions"):
        profile_phase(loaded, cpu(), "decode", tokens=512, rates=RATES)
    with refused(UsageError, "below 1"):
        profile_phase(loaded, cpu(), "decode", batch=0, rates=RATES)
    with refused(UsageError, "prefill, decode"):
        profile_phase(loaded, cpu(), "verify", rates=RATES)


@pytest.mark.slow
def test_the_command_shows_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure_rates", lambda *_: RATES)
    asked = ["explain", "llama", "--device", "cpu", "--phase", "decode", "--kernels", "--context", "12", "--batch", "2"]
    asked += ["--kv-cache-dtype", "fp8"]
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (kernels,) = document["kernels"]
    assert (kernels["phase"], kernels["batch"], kernels["tokens"]) == ("decode", 2, 12)
    assert "fp8 codes" in kernels["notes"][0]
