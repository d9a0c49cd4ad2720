"""Graph capture on an NVIDIA GPU in every mode: bits, state, padding, failures, memory, threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.common.graphs.backend import GraphKey
from core.common.graphs.streams import StreamGraphBackend
from core.device import Device
from core.errors import CaptureError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]
WIDTH, SLOTS = 64, 32
GATE = ("test_cuda::gate",)
INPUTS = {
    "x": InputSpec(("tokens", WIDTH), torch.float32, padding="sentinel", value=float("nan")),
    "slots": InputSpec(("tokens",), torch.int64),
}


class Layer(nn.Module):
    """Writes its input into a cache at the slots, attends over the whole cache, and projects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(SLOTS, WIDTH))
        self.register_buffer("writes", torch.zeros((), dtype=torch.int64))

    def attend(self, x: Tensor, slots: Tensor) -> Tensor:
        self.cache.index_copy_(0, slots, x)
        self.writes.add_(1)
        return torch.softmax(x @ self.cache[1:].nan_to_num().t(), -1) @ self.cache[1:].nan_to_num()

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(self.attend(x, slots))))


class Model(nn.Module):
    """Three layers; row 0 of each cache is where padding goes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, slots)
        return x


@pytest.fixture(scope="module")
def device() -> Device:
    return core.select_device("cuda")


def compiled(device: Device, mode: str, model: nn.Module, **options: Any) -> Program:
    eager = ("layers.*.inner",) if mode == "segmented" else None
    return core.compile(
        model,
        device,
        inputs=INPUTS,
        buckets=[4, 8, 16],
        options=core.CompileOptions(mode=mode, eager=eager, break_at=GATE, **options),
    )


def inputs(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator)
    return {"x": x.cuda(), "slots": (torch.randperm(SLOTS - 1, generator=generator)[:count] + 1).cuda()}


@torch.library.custom_op("test_cuda::gate", mutates_args=())
def gate(x: Tensor) -> Tensor:
    """Stand for an op that runs between graphs."""
    return x * torch.sigmoid(x)


@gate.register_fake
def _gate_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Gated(Model):
    """The model with an op at which piecewise capture cuts."""

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.ops.test_cuda.gate(layer(x, slots))
        return x


@pytest.mark.parametrize(("mode", "num_graphs"), [("full", 1), ("piecewise", 4), ("segmented", 4)])
def test_replays_equal_the_uncaptured_callable_bit_for_bit(mode: str, num_graphs: int, device: Device) -> None:
    model, twin = Gated().cuda().eval(), Gated().cuda().eval()
    with compiled(device, mode, model, passes=()) as program, torch.no_grad():
        assert {bucket.num_graphs for bucket in program.report().buckets} == {num_graphs}
        assert program.report().modes == {"main": mode} and program.report().notes == ()
        twin.load_state_dict(model.state_dict())
        for seed, count in enumerate((16, 8, 4, 16, 4)):
            given = inputs(count, seed)
            assert torch.equal(program(**given), twin(**given))
        assert program.report().fallbacks == {} and sum(program.report().replays.values()) == 5


@pytest.mark.parametrize("mode", ["full", "piecewise", "segmented"])
def test_state_is_written_once_per_replay_and_padding_stays_out(mode: str, device: Device) -> None:
    model, twin = Gated().cuda().eval(), Gated().cuda().eval()
    with compiled(device, mode, model) as program, torch.no_grad():
        before = int(model.layers[0].writes)
        for seed, count in enumerate((5, 3, 13, 7)):
            given = inputs(count, seed)
            ours, theirs = program(**given), twin(**given)
            assert not ours.isnan().any()
            torch.testing.assert_close(ours, theirs)  # other kernels at the padded size
        assert int(model.layers[0].writes) - before == 4
        assert model.layers[0].cache[0].isnan().all(), "padded rows were poisoned and went to row 0"
        for ours, theirs in zip(model.layers, twin.layers, strict=True):
            torch.testing.assert_close(ours.cache[1:], theirs.cache[1:])


def test_a_break_that_fails_leaves_the_device_usable(device: Device) -> None:
    calls = []

    @core.eager_break
    def fails(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("planted in the capture")
        return x + 1

    spec = {"x": InputSpec((8,), torch.float32)}
    with pytest.raises(CaptureError, match="planted in the capture"):
        core.capture(lambda x: fails(x * 2) * 3, device, inputs=spec)
    calls.clear()
    x = torch.ones(8, device="cuda")
    assert (x + 1).sum().item() == 16
    with core.capture(lambda x: x * 2, device, inputs=spec) as program:
        assert program(x=x).tolist() == [2.0] * 8


def test_a_model_that_reads_the_device_runs_segmented_and_says_why(device: Device) -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for expert in range(2):
                rows = (x[:, 0] > expert - 0.5).nonzero().flatten()
                out.index_add_(0, rows, x[rows] * (expert + 1))
            return out

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Router()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = Routed().cuda().eval()
    spec = {"x": InputSpec(("tokens", WIDTH), torch.float32)}
    with core.compile(model, device, inputs=spec, buckets=[4, 8]) as program, torch.no_grad():
        report = program.report()
        assert report.modes == {"main": "segmented"}
        assert any("runs eagerly between graphs" in note and "layers.0.1, layers.1.1" in note for note in report.notes)
        assert {bucket.eager for bucket in report.buckets} == {("layers.0.1", "layers.1.1")}
        for count in (8, 4, 8):
            x = torch.randn(count, WIDTH, device="cuda")
            assert torch.equal(program(x=x), model(x))


@pytest.mark.parametrize("mode", ["full", "piecewise", "segmented"])
def test_closing_gives_the_memory_back_and_another_capture_works(mode: str, device: Device) -> None:
    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    model = Gated().cuda().eval()
    with compiled(device, mode, model) as program:
        program(**inputs(8, 0))  # workspaces of libraries stay, of streams for graphs and of the caller's
    before = reserved()
    for _ in range(2):
        program = compiled(device, mode, model)
        program(**inputs(8, 0))
        program.close()
        del program
        assert reserved() <= before + 2**21


def test_200_captures_take_no_more_memory_than_40(device: Device) -> None:
    """Of the driver too, which keeps the graphs themselves."""
    backend = device.graph_backend()
    x = torch.randn(16, WIDTH, device="cuda")
    model = Model().cuda().eval()
    after: list[int] = []
    with torch.no_grad():
        for _ in range(5):
            with backend.capture_session():
                for index in range(40):
                    key = GraphKey("main", (index,))
                    slots = torch.arange(1, 17, device="cuda")
                    backend.capture_one(key, lambda slots=slots: (model(x, slots),), {}, lambda: None)
            assert len(backend.replay(key)) == 1
            backend.cleanup()
            after.append(taken())
    assert after[-1] <= after[0] + 2**21


def taken() -> int:
    """Return the GPU's memory that this process has; skip where others count too."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    nvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py, which tells this process's memory from others'")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
    by_process = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    found: int | None = by_process.get(os.getpid())
    if found is not None:
        return found
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("the driver does not tell this process's memory from other workers': run this test alone")
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_graphs_share_the_memory_of_their_outputs(device: Device) -> None:
    backend = device.graph_backend()
    assert isinstance(backend, StreamGraphBackend)
    source = torch.ones(2**20, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with backend.capture_session():
        for index in range(8):
            key = GraphKey("main", (index,))
            backend.capture_one(key, lambda: (source.repeat(16),), {}, lambda: None)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 2 * 16 * source.nbytes
    source.fill_(3)
    assert float(backend.replay(key)[0].sum()) == 3 * 16 * 2**20
    backend.cleanup()


def test_two_programs_in_two_threads(device: Device) -> None:
    programs = [compiled(device, mode, Gated().cuda().eval()) for mode in ("full", "segmented")]
    expected = [program(**inputs(8, 1)).clone() for program in programs]
    failures: list[BaseException] = []

    def serve(program: Program, want: Tensor) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(20):
                    assert torch.equal(program(**inputs(8, 1)), want)
        except BaseException as error:
            failures.append(error)

    def capture_more(_: object, __: object) -> None:
        try:
            for _ in range(3):
                core.capture(lambda x: x * 2, device, inputs={"x": InputSpec((8,), torch.float32)}).close()
        except BaseException as error:
            failures.append(error)

    jobs: list[tuple[Callable[..., None], Any, Any]] = [(serve, *each) for each in zip(programs, expected, strict=True)]
    threads = [threading.Thread(target=job, args=(a, b)) for job, a, b in [*jobs, (capture_more, None, None)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for program in programs:
        program.close()


def test_graphs_outlive_the_workspaces_of_others(device: Device) -> None:
    """As `torch.compile(mode="reduce-overhead")` does whenever it records."""
    model = nn.Linear(16384, 256, bias=False).cuda().eval().to(torch.bfloat16)  # long sums: cuBLAS shares them out
    spec = {"input": InputSpec(("tokens", 16384), torch.bfloat16)}
    with core.compile(model, device, inputs=spec, buckets=[64]) as program, torch.no_grad():
        x = torch.randn(64, 16384, device="cuda", dtype=torch.bfloat16)
        wanted = program(input=x).clone()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((2**25,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]  # a workspace's size
        for _ in range(3):
            assert torch.equal(program(input=x), wanted)
        assert all(bool((other == 7).all()) for other in others)
