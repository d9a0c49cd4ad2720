"""The CUDA plugin: what it says without a GPU, and capture and replay on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import core
from core.common.graphs.backend import GraphKey
from core.errors import CaptureError, DeviceUnavailableError
from core.probe import Probe
from core_cuda import plugin
from core_cuda.runner import cuda_graph_backend

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU and a CUDA build of torch")
KEY, OTHER = GraphKey("decode", (4,)), GraphKey("decode", (8,))


def nothing() -> None:
    """Be the callback after warm-up."""


def announce(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    answer = Probe(available=available, device_count=int(available), reason="planted reason", hint="planted hint")
    monkeypatch.setattr(plugin, "probe", lambda: answer)


def test_without_a_driver_cause_and_remedy_come_from_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, available=False)
    with pytest.raises(DeviceUnavailableError) as caught:
        core.select_device("cuda")
    assert (caught.value.found, caught.value.remedy) == ("planted reason", "planted hint")


def test_a_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, available=True)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceUnavailableError, match="is built without CUDA"):
        core.select_device("cuda")


def test_a_torch_newer_than_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, available=True)
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailableError, match="cannot use the GPU: planted reason"):
        core.select_device("cuda")


def test_a_capture_outside_a_session_is_refused() -> None:
    with pytest.raises(CaptureError, match="no capture session is open"):
        cuda_graph_backend(torch.device("cpu")).capture_one(KEY, tuple, {}, nothing)


@pytest.mark.parametrize(
    ("capability", "triton", "missing"),
    [
        ((9, 0), True, ""),
        ((8, 0), True, ""),
        ((7, 5), True, "they need compute capability 8.0, and the GPU has 7.5"),
        ((9, 0), False, "triton is not installed (pip install triton)"),
    ],
)
def test_what_keeps_kernels_from_running_is_said(
    capability: tuple[int, int], triton: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: object() if triton else None)
    assert plugin.kernels_missing(capability) == missing
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    context: Any = SimpleNamespace(parts=SimpleNamespace(torch_device=torch.device("cuda", 0)))
    names = {implementation.op for implementation in plugin.core_register_ops(context)}
    assert bool(names) == bool(plugin.core_register_passes(context)) == (not missing)
    assert not names or {"core::rotary_attention", "core::gated_linear", "core::grouped_mlp"} <= names


@pytest.mark.gpu
@needs_gpu
def test_the_device_opens_and_counts_memory() -> None:
    device = core.select_device("cuda")
    assert device.torch_device == torch.device("cuda", 0)
    assert device.capabilities.modes == ("full", "piecewise", "segmented")
    assert device.capabilities.asynchronous and device.capabilities.device_lengths
    assert str(device.capabilities.extra["kernels"]).startswith("triton ") and len(device.ops) >= 15
    busy = torch.randn(4096, 4096, device=device.torch_device)
    for _ in range(20):
        busy = busy @ busy / 64
    wait = device.record()
    wait()  # what was queued before the mark is done, whatever comes after
    block = torch.ones(2**20, device=device.torch_device)
    memory = device.parts.memory()
    assert block.nbytes <= memory.used_bytes <= memory.peak_bytes < memory.total_bytes
    with device.parts.side_stream():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
    with pytest.raises(DeviceUnavailableError, match="counted from 0"):
        core.select_device("cuda", torch.cuda.device_count())


@pytest.mark.gpu
@needs_gpu
def test_replays_follow_their_inputs_bit_for_bit() -> None:
    backend = core.select_device("cuda").graph_backend()
    weight = torch.randn(64, 64, device="cuda")
    buffers = {KEY: torch.zeros(4, 64, device="cuda"), OTHER: torch.zeros(8, 64, device="cuda")}
    calls: list[str] = []

    def program(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append("run")
        hidden = torch.relu(buffer @ weight)
        return hidden @ weight, hidden.sum(-1)

    with backend.capture_session():
        for key, buffer in buffers.items():
            outputs = backend.capture_one(
                key, lambda buffer=buffer: program(buffer), {"x": buffer}, lambda: calls.append("warm")
            )
            assert backend.can_run(key) and [out.size(0) for out in outputs] == [key.dims[0]] * 2
    assert calls == ["run", "run", "run", "warm", "run", "run", "warm", "run"]
    addresses = {key: [out.data_ptr() for out in backend.replay(key)] for key in buffers}
    for _ in range(3):
        for key, buffer in buffers.items():
            buffer.copy_(torch.randn_like(buffer))
            outputs = backend.replay(key)
            assert [out.data_ptr() for out in outputs] == addresses[key]
            for out, eager in zip(outputs, program(buffer), strict=True):
                assert torch.equal(out, eager)


@pytest.mark.gpu
@needs_gpu
def test_a_failed_capture_leaves_the_device_usable() -> None:
    backend = core.select_device("cuda").graph_backend()
    buffer = torch.ones(4, device="cuda")
    capturing = []

    def syncs() -> tuple[torch.Tensor, ...]:
        total = buffer * 2
        if capturing:
            total.sum().item()
        return (total,)

    def raises() -> tuple[torch.Tensor, ...]:
        if capturing:
            raise ValueError("mid-capture")
        return (buffer * 2,)

    with backend.capture_session():
        with pytest.raises(RuntimeError):
            backend.capture_one(KEY, syncs, {}, lambda: capturing.append(1))
        capturing.clear()
        with pytest.raises(ValueError, match="mid-capture"):
            backend.capture_one(KEY, raises, {}, lambda: capturing.append(1))
        assert not backend.can_run(KEY)
        assert (buffer + 1).sum().item() == 8
        backend.capture_one(KEY, lambda: (buffer * 3,), {}, nothing)
    buffer.fill_(5)
    assert backend.replay(KEY)[0].tolist() == [15.0] * 4


def _capture_once(backend: Any) -> None:
    """Leave what stays for the next program: a stream, and the memory of cuBLAS's workspace for it."""
    one = torch.ones((), device="cuda")
    with backend.capture_session():
        backend.capture_one(KEY, lambda: (one + 1,), {}, nothing)
    backend.cleanup()


@pytest.mark.gpu
@needs_gpu
def test_the_memory_of_a_failed_capture_comes_back() -> None:
    backend = core.select_device("cuda").graph_backend()
    capturing: list[int] = []

    def syncs() -> tuple[torch.Tensor, ...]:
        block = torch.ones(64 * 2**20, device="cuda")
        if capturing:
            block.sum().item()
        return (block,)

    _capture_once(backend)
    before = torch.cuda.memory_reserved()
    with backend.capture_session(), pytest.raises(RuntimeError):
        backend.capture_one(KEY, syncs, {}, lambda: capturing.append(1))
    backend.cleanup()
    assert torch.cuda.memory_reserved() <= before + 2**22


@pytest.mark.gpu
@needs_gpu
def test_cleanup_gives_memory_back_and_allows_another_capture() -> None:
    device = core.select_device("cuda")
    backend = device.graph_backend()
    buffer = torch.ones(2**20, device="cuda")
    _capture_once(backend)
    before = torch.cuda.memory_reserved()
    with backend.capture_session():
        backend.capture_one(KEY, lambda: (torch.cat([buffer] * 64),), {}, nothing)
    assert torch.cuda.memory_reserved() >= before + 64 * buffer.nbytes
    backend.cleanup()
    assert not backend.can_run(KEY)
    assert torch.cuda.memory_reserved() <= before + buffer.nbytes
    with backend.capture_session():
        backend.capture_one(KEY, lambda: (buffer + 1,), {}, nothing)
    assert backend.replay(KEY)[0][0].item() == 2
