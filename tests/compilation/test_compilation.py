"""core/compilation/compile.py: options, passes, op implementations, failures, and what is told while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.common.graphs.backend import BoundCallable, CallBackend, GraphKey
from core.common.lowering import Lowerings, inline
from core.common.ops.attention.paged import ATTENTION, reference
from core.common.ops.implementation import OpCall, OpImplementation
from core.compilation.trace.tracing import trace
from core.errors import CaptureError, DeviceUnavailableError, LoweringError, TraceError, UsageError
from tests.support import compile_with, cpu, refused

ROWS = {"x": InputSpec(("n", 2), torch.float32)}
X = torch.arange(1.0, 7).view(3, 2)


def model(x: Tensor) -> Tensor:
    return (x + 1) * (x + 2)


def compiled(device: Mapping[str, Any] | None = None, **options: Any) -> Program:
    options = {"inputs": ROWS, "buckets": [4, 8], "lowering": "inline"} | options
    return compile_with(options.pop("model", model), cpu(**device or {}), **options)


def test_a_device_may_be_named() -> None:
    program = core.compile(model, "cpu", inputs=ROWS, buckets=[4], lowering="inline")
    assert program.device.name == "cpu" == program.report().device
    assert torch.equal(program(x=X), model(X))
    with pytest.raises(DeviceUnavailableError, match="nowhere"):
        core.compile(model, "nowhere", inputs=ROWS, buckets=[4])


def test_defaults_are_the_devices() -> None:
    own = Lowerings(available={"acme": inline}, default="acme")
    report = compiled({"lowerings": own}, lowering=None).report()
    assert (report.lowering, report.modes) == ("acme", {"main": "compile"})


@pytest.mark.parametrize(
    ("options", "phrases"),
    [
        ({"mode": "full"}, ("mode 'full' for phase 'main'", "compile, off", "choose one")),
        ({"mode": {"main": "piecewise"}}, ("mode 'piecewise' for phase 'main'", "compile, off")),
        ({"mode": {"decod": "off"}}, ("modes for phases ['decod']", "name the phases ['main']", "name only these")),
        ({"lowering": "gcc"}, ("lowering 'gcc'", "inductor, inline", "--lowering")),
        (
            {"passes": ("lift_rms",)},
            ("choosing pass 'lift_rms'", "it is none of the passes: ", "did you mean 'lift_rms_norm'?"),
        ),
        ({"disable_passes": ("absent",)}, ("choosing pass 'absent'", "lift_rms_norm", "name one of these")),
        ({"verify": "full"}, ("verify='full' for phase 'main'", "no example inputs", "examples={'main': [inputs]}")),
        ({"examples": {"decode": []}}, ("examples for phases ['decode']", "phases ['main']", "name only these")),
        ({"examples": [{"y": X}]}, ("examples for phase 'main'", "a set holds ['y']", "the declared inputs: x")),
        ({"examples": [{"x": X.half()}]}, ("example input 'x' of dtype torch.float16", "declared as torch.float32")),
        ({"examples": [{"x": X.t()}]}, ("input 'x' of shape (2, 3)", "declares ('n', 2)")),
        ({"model": {"decode": model}}, ("models for phases ['decode']", "phases ['main']", "exactly one per phase")),
        ({"buckets": []}, ("buckets []", "not a list of at least one bucket")),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else next(iter(value)),
)
def test_bad_options_are_refused_before_any_work(options: dict[str, Any], phrases: tuple[str, ...]) -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("the model was traced")

    with refused(UsageError, *phrases):
        compiled(**({"model": never} | options))


class Paged(nn.Module):
    """One call of core::attention on a sample's own caches, spelt as users spell it."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        call = dict(next(iter(ATTENTION.samples(torch.float32, torch.device("cpu")))).kwargs)
        self.query = call["query"].clone()
        self.window = window
        self.arguments = {k: v for k, v in call.items() if k not in ("query", "scale")}

    def forward(self, query: Tensor) -> Tensor:
        return torch.ops.core.attention(query, **self.arguments, scale=0.25, window=self.window)


def attend(*implementations: OpImplementation, window: int = 0) -> tuple[Program, Paged]:
    paged = Paged(window)
    specs = {"query": InputSpec(tuple(paged.query.shape), torch.float32)}
    return compiled({"ops": implementations}, model=paged, inputs=specs, buckets=None), paged


def plus_one(*args: Any, **kwargs: Any) -> Tensor:
    return reference(*args, **kwargs) + 1


def no_window(call: OpCall) -> str | None:
    return f"window {call.args['window']} is not supported" if call.args["window"] else None


IMPLEMENTED = OpImplementation(op="core::attention", name="acme_paged", fn=plus_one, condition=no_window)


def test_an_op_implementation_is_used_where_its_condition_holds() -> None:
    program, paged = attend(IMPLEMENTED)
    (choice,) = program.report().traces[0].ops
    assert (choice.op, choice.implementation, choice.refused) == ("core::attention", "acme_paged", ())
    assert torch.equal(program(query=paged.query), paged(paged.query) + 1)


def test_a_refused_implementation_leaves_the_reference_and_its_reason() -> None:
    program, paged = attend(IMPLEMENTED, window=2)
    (choice,) = program.report().traces[0].ops
    assert choice.implementation == "reference"
    assert choice.refused == (("acme_paged", "window 2 is not supported"),)
    assert torch.equal(program(query=paged.query), paged(paged.query))


def test_a_raising_condition_is_blamed() -> None:
    def condition(call: OpCall) -> str | None:
        raise KeyError("head_size")

    broken = OpImplementation(op="core::attention", name="acme_paged", fn=plus_one, condition=condition)
    with refused(LoweringError, "'acme_paged'", "core::attention", "KeyError: 'head_size'", "None or a reason"):
        attend(broken)


class Fragile(CallBackend):
    """Fails at the second capture; remembers what it was asked."""

    made: list[Fragile]
    error: Exception

    def __init__(self) -> None:
        super().__init__()
        self.cleanups = 0
        self.in_session: list[bool] = []
        self.made.append(self)

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        self.in_session.append(gc.isenabled())
        if self._programs:
            raise self.error
        return super().capture_one(key, fn, inputs, after_warmup)

    def cleanup(self) -> None:
        self.cleanups += 1
        super().cleanup()


def fragile(raises: Exception) -> type[Fragile]:
    class Backend(Fragile):
        made: list[Fragile] = []  # noqa: RUF012  # one list per class is the point
        error = raises

    return Backend


def test_a_failing_capture_cleans_up_and_names_its_key() -> None:
    backend = fragile(RuntimeError("operation not permitted while capturing"))
    phrases = ("capturing main[4] on cpu", "RuntimeError: operation not permitted", "mode 'off'")
    with refused(CaptureError, *phrases):
        compiled({"graph_backend": backend})
    (made,) = backend.made
    assert made.cleanups == 1 and not made.can_run(GraphKey("main", (8,)))
    assert made.in_session == [False, False]  # the collector rests while graphs are captured
    assert gc.isenabled()


def test_the_collector_rests_from_the_first_trace_to_the_last_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        enabled.append(gc.isenabled())
        return trace(*args, **kwargs)

    monkeypatch.setattr("core.compilation.phases.tracer.trace", watched)
    compiled().close()
    assert enabled and not any(enabled) and gc.isenabled()
    with refused(TraceError, "as one graph"):
        core.compile(breaks, cpu(), inputs=ROWS, buckets=[4], strict=True)
    assert not any(enabled) and gc.isenabled()


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x + 1


def test_a_backends_own_error_is_passed_on() -> None:
    own = CaptureError("capturing on acme", found="pool exhausted", remedy="use smaller buckets")
    backend = fragile(own)
    with pytest.raises(CaptureError) as caught:
        compiled({"graph_backend": backend})
    assert caught.value is own
    assert caught.value.__notes__ == ["while capturing main[4] on cpu"]
    assert backend.made[0].cleanups == 1


def test_a_failing_trace_cleans_up_too() -> None:
    backend = fragile(RuntimeError("unused"))
    with pytest.raises(core.CoreError, match="tracing"):
        compiled({"graph_backend": backend}, model=lambda x: print(x) or x, mode="compile")  # noqa: T201
    assert backend.made[0].cleanups == 1


def test_a_failing_lowering_names_its_key() -> None:
    def fails(request: Any) -> Any:
        raise NotImplementedError("op mul")

    own = Lowerings(available={"acme": fails, "inline": inline}, default="acme")
    phrases = ("lowering main[8] by 'acme'", "NotImplementedError: op mul", "use lowering 'inline'")
    with refused(LoweringError, *phrases):
        compiled({"lowerings": own}, lowering=None)


def test_a_model_that_fails_on_zeros_names_its_key() -> None:
    table = torch.arange(4.0)
    specs = {"index": InputSpec(("n",), torch.int64, padding="sentinel", value=9)}
    with refused(CaptureError, "capturing main[4] on cpu", "IndexError", "mode 'off'"):
        compiled(model=lambda index: table[index], inputs=specs, buckets=[4])


def test_a_lowering_may_change_its_graph() -> None:
    seen: list[tuple[int, ...]] = []

    def greedy(request: Any) -> Any:
        seen.append(next(tuple(v.shape) for v in request.example_inputs if isinstance(v, Tensor)))
        call = inline(request)
        code = request.graph.code
        for node in request.graph.graph.nodes:
            node.meta.clear()
        assert "add" in code
        return call

    program = compiled({"lowerings": Lowerings(available={"greedy": greedy}, default="greedy")}, lowering=None)
    assert seen == [(8, 2), (4, 2)]  # a compiler sees each bucket, largest first
    assert torch.equal(program(x=X), model(X))


def test_a_lowering_for_any_size_is_asked_once_per_trace() -> None:
    asked: list[int] = []

    def counted(request: Any) -> Any:
        asked.append(len(request.example_inputs))
        return inline(request)

    own = Lowerings(available={"acme": counted}, default="acme", any_size=frozenset({"acme"}))
    program = compiled({"lowerings": own}, lowering=None, buckets=[1, 2, 4, 8])
    assert len(asked) == 1 == program.report().num_traces
    for count in (1, 2, 3, 8):
        assert torch.equal(program(x=torch.ones(count, 2)), torch.full((count, 2), 6.0))


def test_progress_counts_the_traces_and_the_captures() -> None:
    told: list[tuple[str, int, int]] = []
    compiled(progress=lambda *step: told.append(step))
    captures = [("capture main[8]", 0, 2), ("capture main[4]", 1, 2), ("capture", 2, 2)]
    assert told == [("trace main", 0, 1), *captures]
    told.clear()
    compiled(mode="off", progress=lambda *step: told.append(step))
    assert told == []


def test_a_model_that_branches_on_size_is_traced_per_branch() -> None:
    def branches(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] > 4 else x - 1

    program = compiled(model=branches, buckets=[3, 4, 6, 8])
    report = program.report()
    assert [[key.dims[0] for key in trace.buckets] for trace in report.traces] == [[8, 6], [4, 3]]
    assert report.traces[0].reason == "" and "x has size 4" in report.traces[1].reason
    assert torch.equal(program(x=X), X - 1)
    assert torch.equal(program(x=torch.ones(6, 2)), torch.full((6, 2), 2.0))


@pytest.mark.slow
def test_compiling_again_and_again_meets_no_limit() -> None:
    for _ in range(10):  # Dynamo's recompile limit is 8
        assert compiled(buckets=[4]).report().num_traces == 1


def test_wrong_arguments_are_refused_before_tracing() -> None:
    inputs = {"x": core.InputSpec(("n", 2), torch.float32)}
    with refused(UsageError, "device None", "a device name such as 'auto'"):
        core.compile(model, None, inputs=inputs, buckets=[4])  # type: ignore[arg-type]
    with refused(UsageError, "with the inputs 'y'", "name the inputs as the model's forward"):
        core.compile(model, cpu(), inputs={"y": inputs["x"]}, buckets=[4])
    with refused(UsageError, "it can't be called"):
        core.compile("model", cpu(), inputs=inputs, buckets=[4])  # type: ignore[arg-type]
    with refused(UsageError, "bucket 4", "bucket dimensions are: none", "leave `buckets` out"):
        core.compile(model, cpu(), inputs={"x": X}, buckets=[4])
    with refused(UsageError, "compiling without buckets", "buckets=[{'n': 8}]"):
        core.compile(model, cpu(), inputs=inputs)
    with refused(UsageError, "a dtype a torch.dtype"):
        core.InputSpec(("n", 2), "float32")  # type: ignore[arg-type]
    with refused(UsageError, "input dimension -1"):
        core.InputSpec(("n", -1), torch.float32)
