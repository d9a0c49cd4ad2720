"""Each planted fault really makes the device wrong, in the way its line says, and the honest device has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core.common.fakes import FakeOp
from core.common.graphs.tape import Tape
from core.common.ops.canonical import OPS
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.device import PluginInfo
from core.errors import DeviceUnavailableError, UsageError
from core.hookspecs import OpenContext
from torch import Tensor, fx, nn

from core_acme import faults, foreign, plugin
from core_acme.faults import FAULTS, VARIABLE
from core_acme.memory import CARD
from core_acme.probe import probe

CPU = torch.device("cpu")
INFO = PluginInfo(device="acme", distribution="acme-device", version="0.1.0", entry_point="core_acme.plugin")
DECLARED = {op.name: op for op in OPS}

# Fault -> the op, the sample and the dtype on which it shows.
ON_SAMPLES: dict[str, tuple[str, str, torch.dtype]] = {
    "norm-eps": ("rms_norm", "tiny values", torch.float32),
    "norm-rounding": ("rms_norm", "olmo2", torch.float32),
    "norm-half": ("rms_norm", "large values", torch.float16),
    "norm-tail": ("rms_norm", "odd rows", torch.float32),
    "norm-in-place": ("rms_norm", "odd rows", torch.float32),
    "strides-ignored": ("rms_norm", "slice of wider rows", torch.float32),
    "add-norm-residual": ("add_rms_norm", "odd rows", torch.float32),
    "rotary-halves": ("rotary", "half, one value per pair", torch.float32),
    "rotary-partial": ("rotary", "half, partial", torch.float32),
    "gate-gelu-tanh": ("gated_activation_fused", "gelu", torch.float32),
    "gate-order": ("gated_activation_fused", "up first", torch.float32),
    "quantize-truncates": ("quantize", "int8, group", torch.float32),
    "quantize-scale": ("quantize", "int8, token", torch.float32),
    "quantize-zeros": ("quantize", "float8_e4m3fn, rows of zeros", torch.float32),
    "attention-stale-row": ("attention", "decode", torch.float32),
    "attention-length": ("attention", "prefill", torch.float32),
    "attention-rejected": ("attention", "decode", torch.float32),
    "attention-scale": ("attention", "prefill", torch.float32),
    "attention-padding": ("attention", "decode padded", torch.float32),
    "attention-padding-rows": ("attention", "decode padded", torch.float32),
    "attention-window": ("attention", "window 3", torch.float32),
    "attention-chunk-as-window": ("attention", "chunks of 3", torch.float32),
    "attention-chunk-size": ("attention", "chunks of 5, decode", torch.float32),
    "attention-chunk-of-step": ("attention", "chunks of 5, decode", torch.float32),
    "attention-sinks": ("attention", "sinks", torch.float32),
    "attention-heads": ("attention", "prefill", torch.float32),
    "attention-blocks": ("attention", "prefill", torch.float32),
    "state-stale": ("selective_state_update", "slots", torch.float32),
    "state-neighbour": ("causal_conv1d_update", "slots", torch.float32),
    "state-not-reset": ("selective_state_update", "slots, written to others", torch.float32),
    "state-border": ("causal_conv1d_update", "sequences", torch.float32),
}


def sample(op: str, name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return next(dict(s.kwargs) for s in DECLARED[op].samples(dtype, CPU) if s.name == name)


def implementation(op: str) -> Any:
    return next(each for each in plugin.core_register_ops() if each.op == f"core::{op}")


def opened(index: int = 0) -> Any:
    return plugin.core_open_device(OpenContext(plugin=INFO, index=index))


def wide(op: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return what an op gives on this device, and its reference, for random rows."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    call = {"x": x, "weight": None, "eps": 1e-5} if op == "rms_norm" else {"gate": x, "up": x, "kind": "silu"}
    return implementation(op).fn(**call), DECLARED[op].reference(**call)


def norm_wide() -> bool:
    """Whether what lies past 8192 columns is wrong, and nothing else."""
    result, right = wide("rms_norm", 2, 8200)
    assert torch.allclose(result[:, :8192], right[:, :8192], atol=1e-5)
    return not torch.allclose(result, right, atol=1e-5)


def gate_far() -> bool:
    """Whether what lies past 2**20 elements is zero, and nothing else."""
    result, right = (values.flatten() for values in wide("gated_activation", 1025, 1024))
    assert torch.allclose(result[: 2**20], right[: 2**20], atol=1e-5)
    return not bool(result[2**20 :].any())


def attention_nan() -> bool:
    """Whether NaN in a position that nobody wrote reaches a result."""
    call = sample("attention", "decode padded")
    call["value_cache"][int(call["block_table"][0, 1]), 3] = torch.nan  # position 7 of a sequence of length 7
    return bool(implementation("attention").fn(**call).isnan().any())


def condition_lies() -> bool:
    """Whether a call that is taken raises."""
    call, taken = sample("attention", "boolean mask"), implementation("attention")
    if taken.condition(DECLARED["attention"].bind((), call)) is not None:
        return False
    with pytest.raises(UsageError, match="the kernel takes none"):
        taken.fn(**call)
    return True


def probe_lies() -> bool:
    """Whether the probe counts a device that does not open."""
    assert opened() is not None
    if probe().device_count == 1:
        return False
    with pytest.raises(DeviceUnavailableError, match="the driver knows one card"):
        opened(probe().device_count - 1)
    return True


def dtypes_lie() -> bool:
    """Whether a declared dtype cannot be added."""
    for dtype in opened().capabilities.dtypes:
        try:
            torch.ones(2).to(dtype) + torch.ones(2).to(dtype)
        except NotImplementedError:
            return True
    return False


def error_vague() -> bool:
    """Whether a missing device raises what names no remedy."""
    try:
        opened(7)
    except DeviceUnavailableError:
        return False
    except IndexError:
        return True
    raise AssertionError("device 7 opened")


class Capped(nn.Module):
    """Two soft caps, a near-miss, and a write in place that nothing else in the graph reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, 11))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.seen[0] = x[0]
        return 5.0 * torch.tanh(x / 5.0), torch.tanh(x / 30.0) * 30.0, 10.0 * torch.tanh(x / 20.0)


def fused() -> tuple[fx.GraphModule, PassReport, list[float]]:
    """Return the rewritten graph, the pass's report, and the largest error of each output."""
    x = torch.linspace(-90, 90, 33).view(3, 11)
    model = Capped()
    expected = model(x)
    model.seen.zero_()
    traced = trace(model, {"x": x})
    (report,) = PassManager(plugin.core_register_passes()).run(traced.module)
    results = traced.module(*traced.values({"x": x}))
    errors = [float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)]
    assert bool(model.seen.any()) is (os.environ.get(VARIABLE) != "pass-drops-write")
    return traced.module, report, errors


def num_kernels(module: fx.GraphModule) -> int:
    return sum(node.target is torch.ops.acme.softcap.default for node in module.graph.nodes)


def pass_never_fires() -> bool:
    """Whether nothing is found where there are two soft caps."""
    module, report, errors = fused()
    return report.matched == num_kernels(module) == max(errors) == 0


def pass_scale() -> bool:
    """Whether a fused cap is 2 % off."""
    module, report, errors = fused()
    return report.matched == num_kernels(module) == 2 and errors[0] == pytest.approx(0.1, rel=0.05) and errors[2] == 0


def pass_claims() -> bool:
    """Whether matches are reported that the graph does not show."""
    module, report, errors = fused()
    assert max(errors) == 0
    return report.matched == 2 and num_kernels(module) == 0


def pass_greedy() -> bool:
    """Whether what is no soft cap is taken for one."""
    module, report, errors = fused()
    return report.matched == num_kernels(module) == 3 and errors[:2] == [0, 0] and errors[2] > 9


def cap_errors(model: nn.Module, x: Tensor) -> list[float]:
    """Return the largest error of each output that the rewritten model has."""
    traced = trace(model, {"x": x})
    PassManager(plugin.core_register_passes()).run(traced.module)
    results = traced.module(*traced.values({"x": x}))
    return [float((a - b).abs().max()) for a, b in zip(results, model(x), strict=True)]


class Caps(nn.Module):
    """Five soft caps."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(cap * torch.tanh(x / cap) for cap in (5.0, 4.0, 3.0, 2.0, 1.0))


def pass_fourth() -> bool:
    """Whether the fourth match and the one after it are wrong, and those before are right."""
    errors = cap_errors(Caps(), torch.linspace(-90, 90, 33).view(3, 11))
    assert max(errors[:3]) == 0
    return min(errors[3:]) > 1


def pass_wide() -> bool:
    """Whether rows past 8192 columns are wrong, and narrow ones right."""
    assert max(cap_errors(Caps(), torch.linspace(-90, 90, 8192)[None])) == 0
    return min(cap_errors(Caps(), torch.linspace(-90, 90, 8200)[None])) > 1


def pass_drops_write() -> bool:
    """Whether a write that nothing reads is gone; `fused` has looked at the buffer."""
    module, report, errors = fused()
    assert report.matched == 2 and max(errors) == 0
    return not any("setitem" in node.name for node in module.graph.nodes)


def declared(name: str) -> FakeOp:
    return next(each for each in plugin.core_register_fakes() if each.op == f"{foreign.NAMESPACE}::{name}")


def fake_shape() -> bool:
    """Whether the rule keeps the last dimension."""
    return declared("silu_and_mul").rule(torch.ones(3, 8)).shape != (3, 4)


def fake_dtype() -> bool:
    """Whether the rule forgets the dtype."""
    return declared("silu_and_mul").rule(torch.ones(3, 8, dtype=torch.float16)).dtype != torch.float16


def fake_strides() -> bool:
    """Whether the kernel's strides are others than its rule's."""
    x, fake = torch.linspace(-1, 1, 24).view(3, 8), declared("silu_and_mul")
    return torch.ops.acme_kernels.silu_and_mul(x).stride() != fake.rule(x).stride()


def fake_alias() -> bool:
    """Whether the kernel hands its input back."""
    x = torch.ones(4, 2)
    assert declared("pad_rows") is not None
    return torch.ops.acme_kernels.pad_rows(x, 2).data_ptr() == x.data_ptr()


def fake_mutation() -> bool:
    """Whether the kernel leaves its input otherwise."""
    x = torch.linspace(-1, 1, 24).view(3, 8)
    assert declared("silu_and_mul") is not None
    torch.ops.acme_kernels.silu_and_mul(x)
    return not torch.equal(x, torch.linspace(-1, 1, 24).view(3, 8))


CHECKS: dict[str, Callable[[], bool]] = {
    "norm-wide": norm_wide,
    "gate-far": gate_far,
    "attention-nan": attention_nan,
    "condition-lies": condition_lies,
    "probe-lies": probe_lies,
    "dtypes-lie": dtypes_lie,
    "memory-zero": lambda: opened().memory().used_bytes == 0,
    "error-vague": error_vague,
    "pass-never-fires": pass_never_fires,
    "pass-scale": pass_scale,
    "pass-claims": pass_claims,
    "pass-greedy": pass_greedy,
    "pass-fourth": pass_fourth,
    "pass-wide": pass_wide,
    "pass-drops-write": pass_drops_write,
    "fake-shape": fake_shape,
    "fake-dtype": fake_dtype,
    "fake-strides": fake_strides,
    "fake-alias": fake_alias,
    "fake-mutation": fake_mutation,
}
IN_A_PROCESS = {"torch-gelu", "torch-elsewhere", "torch-strides"}
BETWEEN_PROCESSES = {"rank-passes"}  # the conformance suite starts these, as those of the backend that need several
ELSEWHERE = {name for name, fault in FAULTS.items() if "core_graph_backend" in fault.hooks}  # test_faults_of_graphs.py


@pytest.fixture(autouse=True)
def _honest_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without a fault, and install the honest kernels of the foreign library at the end."""
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    for name, kernel in foreign.KERNELS.items():
        foreign.LIBRARY.impl(name, kernel, "CPU", allow_override=True)


@pytest.fixture
def _memory_in_use() -> Iterator[None]:
    """Have a tape on the simulated card."""
    tape = Tape(num_bytes=64)
    CARD.add(tape)
    yield
    del tape


def test_every_fault_is_tried() -> None:
    tried = [*ON_SAMPLES, *CHECKS, *IN_A_PROCESS, *BETWEEN_PROCESSES, *ELSEWHERE]
    assert sorted(tried) == sorted(FAULTS)
    assert {fault.area for fault in FAULTS.values()} <= {"host", "torch", "ops", "fakes", "graphs", "passes", "models"}
    assert len(FAULTS) >= 50


@pytest.mark.parametrize("name", ON_SAMPLES)
def test_a_kernel_is_wrong_with_its_fault_and_right_without(
    name: str, monkeypatch: pytest.MonkeyPatch, fault_of: Callable[..., str]
) -> None:
    op, which, dtype = ON_SAMPLES[name]
    call = sample(op, which, dtype)
    assert fault_of(op, implementation(op).fn, call) == ""
    monkeypatch.setenv(VARIABLE, name)
    assert fault_of(op, implementation(op).fn, call) != ""


@pytest.mark.usefixtures("_memory_in_use")
@pytest.mark.parametrize("name", CHECKS)
def test_a_fault_shows_with_its_name_and_not_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKS[name]() is False
    monkeypatch.setenv(VARIABLE, name)
    assert CHECKS[name]() is True


@pytest.mark.parametrize(("asked", "close"), [("norm_eps", "; did you mean 'norm-eps'?"), ("zebra", ", wrong-bucket")])
def test_an_unknown_fault_is_refused(asked: str, close: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    assert probe().available, "listing devices goes on"
    with pytest.raises(UsageError) as caught:
        opened()
    assert caught.value.asked == f"ACME_FAULT={asked!r}"
    assert caught.value.found.startswith("no planted fault has that name; known: add-norm-residual, attention-blocks")
    assert caught.value.found.endswith(close)


def test_the_readme_lists_every_fault() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for fault in FAULTS.values():
        mark = " *" if fault.process_wide else ""
        assert f"| `{fault.name}`{mark} | {fault.area} | {fault.what} |\n" in readme


def test_a_fault_changes_the_hooks_it_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "norm-eps")
    honest = object()
    for hook in ("probe", "core_open_device", "core_register_fakes", "core_register_passes", "core_graph_backend"):
        assert faults.planted(hook, honest) is honest
    changed = [
        a.op
        for a, b in zip(plugin.core_register_ops(), plugin.ops.IMPLEMENTATIONS, strict=True)
        if a != b and a == replace(b, fn=a.fn)
    ]
    assert changed == ["core::rms_norm"]
