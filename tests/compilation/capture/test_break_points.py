"""Break points of whole programs: set by path, by decorator, found by trial; and what goes wrong without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.device import Mode
from core.errors import CaptureError, TraceError, UsageError
from tests.recording import acme, graph_bytes
from tests.support import compile_with, refused

ROWS = {"x": InputSpec(("n", 4), torch.float32)}


class Router(nn.Module):
    """Sends rows to experts by their values, which needs them on the host."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(2):
            index = (x[:, 0] > expert - 0.5).nonzero().flatten()
            out.index_add_(0, index, x[index] * (expert + 1))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.router(torch.relu(self.linear(x)))


class Model(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * 2


class Frozen(nn.Module):
    """Takes its way by the values of its input, unseen by a capture that does not trace."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            positive = bool(x.sum() > 0)
        return x * 2 if positive else x * 3


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = Frozen()

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x + 1) + 1


def compiled(model: Any, mode: Any = "segmented", **options: Any) -> Program:
    options = {"inputs": ROWS, "buckets": [4, 8]} | options
    return compile_with(model, options.pop("device", acme()), mode=mode, **options)


def untouched(model: nn.Module) -> bool:
    return all("forward" not in module.__dict__ for module in model.modules())


def agrees(program: Program, model: nn.Module) -> None:
    for seed, count in enumerate((8, 4, 8, 4)):
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert torch.equal(program(x=x), model(x))
    assert not program.report().fallbacks


def test_modules_are_break_points_by_path() -> None:
    model = Model().eval()
    program = compiled(model, eager=("layers.*.router",))
    agrees(program, model)
    assert untouched(model) and program.report().notes == ()
    names = tuple(f"layers.{number}.router" for number in range(3))
    assert [(b.num_graphs, b.eager) for b in program.report().buckets] == [(4, names)] * 2
    assert "4 graphs around 3 eager layers.*.router" in str(program.report())


def test_whole_layers_may_be_break_points_with_others_inside() -> None:
    model = Model().eval()
    program = compiled(model, eager=("layers.*", "layers.*.router"))
    agrees(program, model)
    assert [b.eager for b in program.report().buckets] == [("layers.0", "layers.1", "layers.2")] * 2


def test_a_marked_function_is_a_break_point_and_elsewhere_itself() -> None:
    @core.eager_break
    def jump(x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x * 3

    def fn(x: Tensor) -> Tensor:
        return jump(x + 1) + 1

    program = core.capture(fn, acme(), inputs=ROWS, buckets=[4])
    for value in (1.0, -5.0, 2.0):
        x = torch.full((4, 4), value)
        assert torch.equal(program(x=x), fn(x))
    (bucket,) = program.report().buckets
    assert bucket.eager[0].endswith("jump") and bucket.num_graphs == 2


def test_a_pattern_without_a_match_is_refused() -> None:
    model, level = Model().eval(), graph_bytes()
    with refused(UsageError, "a break point at 'layers.*.mlp'", "named_modules()"):
        compiled(model, eager=("layers.*.mlp",))
    assert untouched(model) and graph_bytes() == level


def test_a_host_read_names_its_module_where_none_may_be_found() -> None:
    model, level = Model().eval(), graph_bytes()
    with refused(CaptureError, "options=core.CompileOptions(eager=('layers.*.router',))"):
        compiled(model, eager=())
    assert untouched(model) and graph_bytes() == level
    with refused(CaptureError, "options=core.CompileOptions(eager=('layers.0.linear', 'layers.*.router'))"):
        compiled(model, eager=("layers.0.linear",))


def test_modules_that_can_not_be_captured_are_found() -> None:
    model = Model().eval()
    program = compiled(model)
    agrees(program, model)
    (note,) = program.report().notes
    assert "layers.*.router runs eagerly between graphs" in note and "depends on device data" in note
    assert f"note: {note}" in str(program.report()) and untouched(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_a_named_mode_is_never_changed(mode: Mode) -> None:
    model, level = Model().eval(), graph_bytes()
    with pytest.raises((CaptureError, TraceError)):
        compiled(model, mode)
    assert graph_bytes() == level and untouched(model)


@pytest.mark.slow
def test_a_model_that_traces_but_can_not_be_captured_goes_on_in_segments() -> None:
    model = Model().eval()
    program = compiled(model, None)
    agrees(program, model)
    assert program.report().modes == {"main": "segmented"} and program.report().traces == ()
    first, second = program.report().notes
    assert "main runs 'segmented' instead of 'full': it can't be captured" in first and "router" in second


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2


def test_a_model_that_can_not_be_traced_goes_on_in_segments() -> None:
    model = Untraceable()
    program = compiled(model, None)
    agrees(program, model)
    (note,) = program.report().notes
    assert "main runs 'segmented' instead of 'full': it can't be traced" in note
    assert "test_break_points.py:" in note, "the place in the model's code belongs to the reason"


def test_without_segments_a_model_that_can_not_be_traced_runs_eagerly() -> None:
    program = compiled(Untraceable(), None, device=acme(modes=("full",)))
    assert program.report().modes == {"main": "off"} and program.keys == ()
    (note,) = program.report().notes
    assert "main runs 'off' instead of 'full'" in note
    assert program(x=torch.ones(3, 4)).tolist() == [[2] * 4] * 3 and not program.report().fallbacks


@pytest.mark.parametrize("mode", [None, "full", "piecewise"])
def test_strict_refuses_what_can_not_be_traced(mode: Mode | None) -> None:
    with pytest.raises(TraceError):
        compiled(Untraceable(), mode, strict=mode is None)


@pytest.mark.slow
def test_strict_refuses_what_can_not_be_captured() -> None:
    with pytest.raises(CaptureError):
        compiled(Model().eval(), None, strict=True)


@pytest.mark.slow
def test_only_the_phase_that_needs_it_is_changed() -> None:
    program = compiled({"good": lambda x: x * 3, "bad": Model().eval()}, None, buckets={"good": [4, 16], "bad": [4, 8]})
    assert program.report().modes == {"good": "full", "bad": "segmented"}
    assert len(program.keys) == len(program.report().buckets) == 4
    x = torch.randn(4, 4)
    first = program("good", x=x).clone()
    program("bad", x=x)
    assert torch.equal(program("good", x=x), first)


def test_nothing_of_an_attempt_that_failed_stays_captured() -> None:
    """The large bucket can be captured and the small one can't: what was captured must not hold its memory on."""

    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum()) if x.shape[0] == 4 else x + 1

    model, level = nn.Sequential(Small()), graph_bytes()
    specs = {"input": ROWS["x"]}
    direct = compiled(model, "segmented", inputs=specs)
    taken = graph_bytes() - level
    direct.close()
    assert graph_bytes() == level < level + taken
    seen: list[tuple[str, int, int]] = []
    program = compiled(model, None, inputs=specs, progress=lambda *told: seen.append(told))
    assert program.report().modes == {"main": "segmented"}
    assert graph_bytes() == level + taken and len(program.report().buckets) == 2
    assert all(done <= total for _, done, total in seen) and seen[-1] == ("capture", 2, 2)
    for count in (8, 4):
        assert torch.equal(program(input=torch.ones(count, 4)), model(torch.ones(count, 4)))


def test_control_flow_that_was_frozen_is_found_on_further_inputs() -> None:
    model, level = Around(), graph_bytes()
    inputs = [{"x": torch.full((4, 4), value)} for value in (3.0, -9.0)]
    with refused(CaptureError, "checking main[8] on further inputs", "was frozen", "CompileOptions(eager=(its path,))"):
        compiled(model, examples=inputs)
    assert untouched(model) and graph_bytes() == level
    program = compiled(model, examples=inputs, eager=("frozen",))
    for value in (3.0, -9.0):
        x = torch.full((4, 4), value)
        assert torch.equal(program(x=x), model(x))


class Chosen(nn.Module):
    """Reads the last row of a table of one row, and one more for each positive row of x."""

    def forward(self, table: Tensor, x: Tensor) -> Tensor:
        return table.index_select(0, (x.sum(1) > 0).sum().reshape(1))


class Growing(nn.Module):
    """Makes the table, of a length that a capture which does not trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = Chosen()

    def forward(self, x: Tensor) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            length = 1 + int((x.sum(1) > 0).sum())
        return self.chosen(x[:1].expand(length, 4) + 1, x) + 1


def test_a_frozen_length_is_found_where_code_between_graphs_reads_beyond_it() -> None:
    few, many = torch.full((4, 4), -1.0), torch.ones(4, 4)
    few[0] = 1
    with refused(CaptureError, "checking main[4] on further inputs", "out of bounds", "was frozen"):
        compiled(Growing(), examples=[{"x": few}, {"x": many}], eager=("chosen",), buckets=[4])


def test_inputs_that_can_not_be_guessed_are_asked_for() -> None:
    program = core.capture(lambda ids: ids * 2, acme(), inputs={"ids": InputSpec(("n",), torch.int64)}, buckets=[4])
    (note,) = program.report().notes
    assert "not checked on further inputs" in note and "core.CompileOptions(examples={'main': [inputs]})" in note
    checked = core.capture(
        lambda ids: ids * 2,
        acme(),
        inputs={"ids": InputSpec(("n",), torch.int64)},
        buckets=[4],
        options=core.CompileOptions(examples=[{"ids": torch.arange(3)}]),
    )
    assert checked.report().notes == ()


def test_a_callable_of_chance_is_not_checked_and_the_report_says_so() -> None:
    program = core.capture(lambda x: x + torch.rand(x.shape), acme(), inputs=ROWS, buckets=[4])
    (note,) = program.report().notes
    assert "two runs without graphs differ" in note


def test_the_check_leaves_the_buffers_as_it_found_them() -> None:
    specs = {"x": InputSpec(("n", 4), torch.float32, padding="keep")}
    for fn in (lambda x: x * 2, lambda x: x + torch.rand(x.shape)):
        program = core.capture(fn, acme(), inputs=specs, buckets=[4])
        assert not program.inputs(program.keys[0])["x"].any()


def test_results_that_change_their_shape_are_refused_at_replay() -> None:
    grown = [1]

    @core.eager_break
    def growing(x: Tensor) -> Tensor:
        return x[: grown[0]] + 1

    program = core.capture(lambda x: growing(x * 2) * 2, acme(), inputs=ROWS, buckets=[4])
    program(x=torch.ones(4, 4))
    grown[0] = 2
    with refused(CaptureError, "between two graphs", "shape (2, 4)", "shape (1, 4)"):
        program(x=torch.ones(4, 4))
    grown[0] = 1
    assert program(x=torch.ones(4, 4)).tolist() == [[6] * 4]


def test_an_error_in_a_break_at_replay_leaves_the_program_usable() -> None:
    failing = [False]

    @core.eager_break
    def step(x: Tensor) -> Tensor:
        if failing[0]:
            raise RuntimeError("no route")
        return x + 1

    program = core.capture(lambda x: step(x * 2) * 2, acme(), inputs=ROWS, buckets=[4])
    failing[0] = True
    with pytest.raises(RuntimeError, match="no route"):
        program(x=torch.ones(4, 4))
    failing[0] = False
    assert program(x=torch.ones(4, 4)).tolist() == [[6] * 4] * 4


KEPT: list[Tensor] = []


def test_a_model_that_keeps_a_computed_tensor_runs_eagerly_and_keeps_no_stand_in() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            KEPT.append(x * 2)
            return x + 1

    with core.compile(Keeps().eval(), acme(), inputs={"x": InputSpec((4, 4), torch.float32)}) as program:
        assert program.report().modes == {"main": "off"} and not KEPT
        program(x=torch.ones(4, 4))
    (kept,) = KEPT
    assert torch.equal(kept, torch.full((4, 4), 2.0))
