"""`NPUGraphBackend` through the real torch_npu: capture, renewal of lists, refusals, pools, streams used up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.common.numerics import judge
from core.common.ops.attention.paged import reference
from core.device import Device
from core.errors import CaptureError, GraphResourcesError, UsageError
from core.host.selection import select_device
from core_npu.ops.attention import attention
from core_npu.runner import NPUGraphBackend
from simulator import runtime

KEY, OTHER = GraphKey("decode", (4,)), GraphKey("decode", (2,))
NO_STREAMS, NO_RESOURCES = 207008, 207005
HEADS, KV_HEADS, SIZE, PAGE, BLOCKS = 4, 2, 64, 16, 9
SCALE = SIZE**-0.5


@pytest.fixture(scope="module")
def npu() -> Device:
    return select_device("npu")


@pytest.fixture
def backend(npu: Device) -> Iterator[NPUGraphBackend]:
    backend = NPUGraphBackend(npu.torch_device)
    yield backend
    backend.cleanup()


def captured(backend: NPUGraphBackend, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad(), backend.capture_session():
        return backend.capture_one(key, fn, inputs, lambda: None)


@dataclass
class Layers:
    """Two attention layers over caches of their own, for steps of one token of each of 4 sequences."""

    inputs: dict[str, Tensor]
    caches: list[Tensor]

    @classmethod
    def make(cls) -> Layers:
        torch.manual_seed(0)
        caches = [torch.randn(BLOCKS, PAGE, KV_HEADS, SIZE).half() for _ in range(4)]
        return cls(cls.step(0, [1, 1, 1, 1]), caches)

    @staticmethod
    def step(seed: int, lens: list[int]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(4, HEADS, SIZE, generator=generator).half()
        new = torch.randn(4, KV_HEADS, SIZE, generator=generator).half()
        table = torch.arange(1, BLOCKS, dtype=torch.int32).view(4, 2)
        last = [length - 1 for length in lens]
        slots = [int(table[i, at // PAGE]) * PAGE + at % PAGE for i, at in enumerate(last)]
        return {
            "query": query,
            "new": new,
            "table": table,
            "slots": torch.tensor(slots),
            "lens": torch.tensor(lens, dtype=torch.int32),
            "starts": torch.arange(5, dtype=torch.int32),
        }

    def on(self, device: torch.device) -> Layers:
        move = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Layers(move, [cache.to(device) for cache in self.caches])

    def run(self, op: Any) -> tuple[Tensor]:
        """Return the second layer's result (4, HEADS, SIZE)."""
        x = self.inputs["query"]
        for keys, values in zip(self.caches[::2], self.caches[1::2], strict=True):
            x = op(
                x,
                self.inputs["new"],
                self.inputs["new"],
                keys,
                values,
                self.inputs["table"],
                self.inputs["slots"],
                self.inputs["lens"],
                self.inputs["starts"],
                scale=SCALE,
                max_query_len=1,
            )
        return (x,)

    def wide(self) -> Layers:
        widen = {n: t.double() if t.is_floating_point() else t for n, t in self.inputs.items()}
        return Layers(widen, [cache.double() for cache in self.caches])


STEPS = ([1, 7, 16, 17], [2, 8, 17, 18], [32, 1, 1, 20], [5, 5, 5, 5])


def write(static: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> dict[str, list[int]]:
    for name, tensor in step.items():
        static[name].copy_(tensor)
    return {name: step[name].tolist() for name in ("lens", "starts")}


def test_several_ops_of_a_graph_are_renewed_at_each_step(npu: Device, backend: NPUGraphBackend) -> None:
    host = Layers.make()
    static = host.on(npu.torch_device)
    (out,) = captured(backend, KEY, lambda: static.run(attention), static.inputs)
    assert backend.host_arguments(KEY) == {"lens", "starts"}
    for ours, theirs in zip(static.caches, host.caches, strict=True):
        ours.copy_(theirs)
    runtime.clear()
    for seed, lens in enumerate(STEPS):
        host.inputs = Layers.step(seed, lens)
        backend.update(KEY, write(static.inputs, host.inputs))
        assert backend.replay(KEY)[0].data_ptr() == out.data_ptr()
        wide = host.wide().run(reference)[0]
        verdict = judge(out.cpu(), host.run(reference)[0], wide)
        assert verdict.passed, (lens, verdict)
    updates = [event.name for event in runtime.log() if event.kind == "update"]
    assert updates == ["aclnnFusedInferAttentionScoreV3"] * 2 * len(STEPS)


def test_stale_lists_would_give_other_values(npu: Device, backend: NPUGraphBackend) -> None:
    """Guards the tests of this file: the values of a step do depend on its lists."""
    static = Layers.make().on(npu.torch_device)
    captured(backend, KEY, lambda: static.run(attention), static.inputs)
    results = []
    for lens in ([5, 5, 5, 5], [30, 30, 30, 30]):
        step = write(static.inputs, Layers.step(0, [5, 5, 5, 5]))
        backend.update(KEY, {**step, "lens": lens})
        results.append(backend.replay(KEY)[0].cpu())
    assert not torch.equal(*results)


def test_a_replay_without_an_update_is_refused_and_never_reaches_the_device(
    npu: Device, backend: NPUGraphBackend
) -> None:
    static = Layers.make().on(npu.torch_device)
    captured(backend, KEY, lambda: static.run(attention), static.inputs)
    step = write(static.inputs, Layers.step(0, STEPS[0]))
    runtime.clear()
    with pytest.raises(CaptureError, match="lens, starts: not renewed"):
        backend.replay(KEY)
    assert not [event for event in runtime.log() if event.kind in ("replay", "deadlock")]
    for wrong in ({}, {"lens": step["lens"]}, {**step, "lens": [1, 2]}, {**step, "more": [1]}):
        with pytest.raises(UsageError):
            backend.update(KEY, wrong)
    with pytest.raises(CaptureError, match=r"update of decode\[2\]"):
        backend.update(OTHER, step)
    assert not [event for event in runtime.log() if event.kind.startswith("update")]
    backend.update(KEY, step)
    backend.replay(KEY)
    with pytest.raises(CaptureError, match="not renewed"):
        backend.replay(KEY)
    npu.synchronize()


def test_graphs_of_a_program_share_their_memory(npu: Device) -> None:
    x = torch.ones(1 << 20, device=npu.torch_device)

    def taken(num_graphs: int) -> int:
        backend = NPUGraphBackend(npu.torch_device)
        npu.parts.empty_cache()
        before = runtime.memory().used_bytes
        for size in range(num_graphs):
            captured(backend, GraphKey("x", (size,)), lambda: ((x * 2 + 1) * 3 + 1,), {"x": x})
        npu.parts.empty_cache()
        used = runtime.memory().used_bytes - before
        backend.cleanup()
        return used

    one, four = taken(1), taken(4)
    assert 0 < four <= 1.5 * one


def test_outputs_stay_until_the_next_replay(npu: Device, backend: NPUGraphBackend) -> None:
    x, y = torch.ones(4, 8, device=npu.torch_device), torch.ones(2, 8, device=npu.torch_device)
    captured(backend, KEY, lambda: (x + 1, x * 3), {"x": x})
    captured(backend, OTHER, lambda: (y * 5,), {"y": y})
    for value in (2.0, 7.0):
        x.fill_(value)
        first, second = backend.replay(KEY)
        torch.empty(4, 8, device=npu.torch_device).fill_(-1)  # not in the graphs' memory
        assert (first.cpu() == value + 1).all() and (second.cpu() == 3 * value).all()
        y.fill_(value)
        assert (backend.replay(OTHER)[0].cpu() == 5 * value).all()


def test_a_graph_without_work_is_no_error(npu: Device, backend: NPUGraphBackend) -> None:
    with torch.no_grad(), backend.capture_session(), backend.segment(KEY._replace(part=0)):
        pass
    backend.replay(KEY._replace(part=0))
    npu.synchronize()


def test_a_host_read_in_a_capture_leaves_the_device_usable(npu: Device, backend: NPUGraphBackend) -> None:
    x = torch.ones(4, device=npu.torch_device)
    captured(backend, OTHER, lambda: (x * 2,), {"x": x})
    calls: list[int] = []

    def reads() -> tuple[Tensor]:
        calls.append(1)
        return (x * x.sum().item(),)

    with pytest.raises(RuntimeError):
        captured(backend, KEY, reads, {"x": x})
    assert len(calls) == 2 and not backend.can_run(KEY)
    (out,) = captured(backend, KEY, lambda: (x + 1,), {"x": x})
    x.fill_(4)
    backend.replay(KEY)
    assert out.tolist() == [5.0] * 4 and backend.replay(OTHER)[0].tolist() == [8.0] * 4


@pytest.mark.parametrize("code", [NO_STREAMS, NO_RESOURCES])
@pytest.mark.parametrize("after", [0, 1])
def test_used_up_streams_leave_what_is_captured(npu: Device, backend: NPUGraphBackend, code: int, after: int) -> None:
    static = Layers.make().on(npu.torch_device)
    (out,) = captured(backend, KEY, lambda: static.run(attention), static.inputs)
    step = write(static.inputs, Layers.step(0, STEPS[0]))
    backend.update(KEY, step)
    backend.replay(KEY)
    wanted = out.cpu()
    if after:
        runtime.fail_next("aclmdlRICaptureEnd", code)
    else:
        runtime.fail_next(runtime.CAPTURE, code)
    with pytest.raises(GraphResourcesError, match="streams are used up") as caught:
        captured(backend, OTHER, lambda: (static.inputs["query"] + 1,), static.inputs)
    assert str(code) in caught.value.found and not backend.can_run(OTHER)
    backend.update(KEY, step)
    backend.replay(KEY)
    assert torch.equal(out.cpu(), wanted)
    captured(backend, OTHER, lambda: (static.inputs["query"] + 1,), static.inputs)
    assert torch.equal(backend.replay(OTHER)[0].cpu(), static.inputs["query"].cpu() + 1)


def test_a_cleanup_gives_the_streams_of_the_graphs_back(npu: Device) -> None:
    before = runtime.stream_counts()[1]
    backend = NPUGraphBackend(npu.torch_device)
    x = torch.ones(4, device=npu.torch_device)
    captured(backend, KEY, lambda: (x + 1,), {"x": x})
    assert runtime.stream_counts()[1] > before
    backend.cleanup()
    assert runtime.stream_counts()[1] == before
