"""Modes on the simulated device: every way to a graph gives what the model gives, once per call and per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.common.numerics import Fp64Mode, judge
from core.device import Mode
from core.errors import UsageError
from tests.recording import acme
from tests.support import Block, compile_with, cpu, refused

WIDTH = 16
ROWS = {"x": InputSpec(("n", WIDTH), torch.float32)}
DEVICE_MODES: tuple[Mode, ...] = ("full", "piecewise", "segmented")
UNTRACED: tuple[Mode, ...] = ("full", "segmented")


@torch.library.custom_op("core_modes::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    """Double by a host's hand: a break point of "piecewise"; rows stay apart, so that padding is right."""
    return x * 2


@mix.register_fake
def _mix_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    """Blocks with a break point between them, and rows of a cache written in place."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.register_buffer("cache", torch.zeros(32, WIDTH))
        self.register_buffer("writes", torch.zeros(1))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.ops.core_modes.mix(layer(x)) + x
        self.cache.index_put_((slots,), x)
        self.writes.add_(1)
        return self.cache[slots] + x


SLOTS = {"slots": InputSpec(("n",), torch.int64, padding="sentinel", value=31)}
BREAKS: Mapping[str, Any] = {"break_at": ("core_modes::mix",), "eager": ("layers.*.norm",)}


def compiled(model: Callable[..., Any], mode: Any, **options: Any) -> Program:
    options = {"inputs": {**ROWS, **SLOTS}, "buckets": [4, 8], "passes": (), **BREAKS} | options
    return compile_with(model, options.pop("device", acme()), mode=mode, **options)


def rows(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", DEVICE_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_equal_the_model_in_every_bit(mode: Mode, dtype: torch.dtype) -> None:
    model = Model().to(dtype).eval()
    program = compiled(model, mode, inputs={"x": InputSpec(("n", WIDTH), dtype), **SLOTS})
    assert program.report().modes == {"main": mode} and not program.report().notes[1:]
    graphs = {bucket.key.dims: (bucket.num_graphs, len(bucket.eager)) for bucket in program.report().buckets}
    assert set(graphs.values()) == {(1, 0) if mode == "full" else (3, 2)}
    for seed, count in enumerate((8, 4, 8, 4)):  # buckets' own sizes: padded shapes are these
        x, slots = rows(count, seed, dtype), torch.arange(count) + seed
        ours = program(x=x, slots=slots).clone()
        cache = model.cache.clone()
        with torch.no_grad():
            assert torch.equal(ours, model(x, slots)) and torch.equal(cache, model.cache)


@pytest.mark.slow
def test_replays_of_compile_equal_the_same_callable_run_plainly() -> None:
    """On "compile" nothing is recorded: what is run is the lowered callable itself, on static buffers."""
    model = Model().eval()
    program = compiled(model, "compile", device=cpu(), lowering="inline")
    for seed in range(3):
        x, slots = rows(4, seed), torch.arange(4)
        with torch.no_grad():
            assert torch.equal(program(x=x, slots=slots), model(x, slots))


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", DEVICE_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_calls_meet_the_criterion(mode: Mode, dtype: torch.dtype) -> None:
    model = Model().to(dtype).eval()
    exact = deepcopy(model).double()
    program = compiled(model, mode, inputs={"x": InputSpec(("n", WIDTH), dtype), **SLOTS}, buckets=[8, 16])
    for seed, count in enumerate((13, 16, 5)):
        x, slots = rows(count, seed, dtype), torch.arange(count)
        with torch.no_grad():
            eager = model(x, slots)
            with Fp64Mode():
                reference = exact(x.double(), slots)
        actual = program(x=x, slots=slots)
        verdict = judge(actual, eager, reference)
        assert verdict.passed, verdict
        assert not judge(actual * 1.03, eager, reference).passed


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", [*DEVICE_MODES, "off"])
def test_state_is_written_once_per_call(mode: Mode) -> None:
    model = Model().eval()
    program = compiled(model, mode)
    model.writes.zero_()
    for call in range(1, 5):
        program(x=rows(3, call), slots=torch.arange(3))
        assert float(model.writes) == call
    assert sum(program.report().replays.values()) == (0 if mode == "off" else 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", DEVICE_MODES)
@pytest.mark.parametrize("padding", ["sentinel", "keep"])
def test_padding_never_reaches_real_rows(mode: Mode, padding: Any) -> None:
    """Rows past the input hold NaN, where the policy leaves them, and so does the row of the cache they write."""
    model = Model().eval()
    value = float("nan") if padding == "sentinel" else 0
    specs = {"x": InputSpec(("n", WIDTH), torch.float32, padding=padding, value=value), **SLOTS}
    program = compiled(model, mode, inputs=specs)
    clean = compiled(Model().eval(), mode)
    for key in program.keys:
        program.inputs(key)["x"].fill_(float("nan"))
    model.cache[31] = float("nan")
    for count in (1, 3, 5, 7):
        x, slots = rows(count, count), torch.arange(count)
        ours, wanted = program(x=x, slots=slots), clean(x=x, slots=slots)
        assert torch.equal(ours, wanted)
        assert not model.cache[:31].isnan().any()
        program.inputs(program.keys[0])["x"][count:].fill_(float("nan"))


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", DEVICE_MODES)
def test_replays_do_not_depend_on_which_bucket_ran_before(mode: Mode) -> None:
    program = compiled(Model().eval(), mode)
    x = rows(4, 1)
    alone = program(x=x, slots=torch.arange(4)).clone()
    for between in (8, 2, 8):
        program(x=rows(between, 9), slots=torch.arange(between))
        assert torch.equal(program(x=x, slots=torch.arange(4)), alone)


@pytest.mark.parametrize("mode", UNTRACED)
def test_captured_callables_equal_themselves(mode: Mode) -> None:
    model = Model().eval()

    def step(x: Tensor, slots: Tensor) -> dict[str, Any]:
        y = model(x, slots)
        return {"rows": y, "first": [y[:, :2], None], "input": x, "sum": y.sum(-1)}

    program = core.capture(
        step,
        acme(),
        inputs={**ROWS, **SLOTS},
        buckets=[4, 8],
        mode=mode,
        options=core.CompileOptions(eager=("layers.*.norm",)),
    )
    assert program.report().lowering == "none" and program.report().traces == ()
    for seed, count in enumerate((8, 4, 8)):
        x, slots = rows(count, seed), torch.arange(count)
        ours = program(x=x, slots=slots)
        with torch.no_grad():
            wanted = step(x, slots)
        assert ours["input"] is x and ours["first"][1] is None
        for name in ("rows", "sum"):
            assert torch.equal(ours[name], wanted[name])
        assert torch.equal(ours["first"][0], wanted["first"][0])
    short = program(x=rows(3, 7), slots=torch.arange(3))
    assert [tuple(t.shape) for t in (short["rows"], short["first"][0], short["sum"])] == [(3, WIDTH), (3, 2), (3,)]


@pytest.mark.slow
def test_piecewise_cuts_at_ops_and_shares_the_code_of_layers() -> None:
    program = compiled(Model(5).eval(), "piecewise")
    (key, *_) = program.keys
    report = program.report()
    assert [(b.num_graphs, b.eager) for b in report.buckets] == [(6, ("core_modes::mix",) * 5)] * 2
    source = program.source(key)
    assert source.count("land(") == 5 and source.count("graph_") == 6 and source.startswith("def ")
    compile(source, "source", "exec")


@pytest.mark.slow
def test_piecewise_without_a_break_point_is_one_graph_and_says_so() -> None:
    program = compiled(Model().eval(), "piecewise", break_at=(), eager=())
    (note,) = program.report().notes
    assert "one graph" in note and [b.num_graphs for b in program.report().buckets] == [1, 1]
    assert program.source(program.keys[0]) == ""


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", DEVICE_MODES)
def test_symbolic_sizes_reach_the_code_between_breaks(mode: Mode) -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.ops.core_modes.mix(x.reshape(x.shape[0] * 2, -1))
        return y.view(x.shape[0], -1) * x.shape[0] + torch.arange(x.shape[0]).view(-1, 1)

    program = compiled(fn, mode, inputs=ROWS, eager=())
    for count in (8, 4):
        x = rows(count, count)
        assert torch.equal(program(x=x), fn(x))


@pytest.mark.parametrize("mode", DEVICE_MODES)
def test_outputs_that_are_inputs_views_and_constants(mode: Mode) -> None:
    weight = torch.arange(3.0)

    def fn(x: Tensor) -> Any:
        return {"new": x + 1, "in": x, "view": x.view(-1, WIDTH), "twice": [weight, weight.view(3, 1)], "none": None}

    program = compiled(fn, mode, inputs=ROWS, break_at=(), eager=())
    for count in (8, 4, 3):
        x = rows(count, count)
        out = program(x=x)
        kept = out["view"]
        assert torch.equal(out["new"], x + 1) and torch.equal(out["in"], x) and torch.equal(kept, x)
        assert torch.equal(out["twice"][0], weight) and out["twice"][1].shape == (3, 1) and out["none"] is None
        program(x=rows(8, 99))
        assert torch.equal(kept, x), "a view of an input buffer has to survive the next write of it"


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", [*DEVICE_MODES, "off"])
def test_calls_without_rows(mode: Mode) -> None:
    program = compiled(Model().eval(), mode)
    assert program(x=rows(0, 0), slots=torch.arange(0)).shape == (0, WIDTH)


@pytest.mark.parametrize("mode", ["compile", "segmented"])
def test_a_mode_that_the_device_lacks_is_refused(mode: Mode) -> None:
    with refused(UsageError, f"mode {mode!r} for phase 'main'", "full, piecewise", "choose one"):
        compiled(Model().eval(), mode, device=acme(modes=("full", "piecewise")))


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", DEVICE_MODES)
def test_state_after_compile_is_as_before_with_reset(mode: Mode) -> None:
    model = Model().eval()
    model.cache.fill_(7)
    order: list[float] = []

    def reset() -> None:
        order.append(float(model.writes))
        model.writes.zero_()
        model.cache.fill_(7)

    program = compiled(model, mode, reset=reset)
    assert float(model.writes) == 0 and (model.cache == 7).all()
    assert order[0] >= 1, "the first call comes after the warm-up"
    program(x=rows(4, 1), slots=torch.arange(4))
    assert float(model.writes) == 1


def test_captures_reset_state_too_and_check_from_it() -> None:
    count = torch.zeros(1)

    def fn(x: Tensor) -> Tensor:
        count.add_(1)
        return x * count

    program = core.capture(fn, acme(), inputs=ROWS, buckets=[4], options=core.CompileOptions(reset=count.zero_))
    assert float(count) == 0 and program.report().notes == ()
    assert torch.equal(program(x=torch.ones(4, WIDTH)), torch.ones(4, WIDTH))
    assert torch.equal(program(x=torch.ones(4, WIDTH)), torch.full((4, WIDTH), 2.0))


def test_a_captured_callable_keeps_the_memory_it_reads() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    layer = nn.Linear(WIDTH, WIDTH)
    reference = StorageWeakRef(layer.weight.untyped_storage())
    program = core.capture(lambda x: layer(x), cpu(), inputs=ROWS, buckets=[4], mode="compile")
    layer.weight.data = torch.zeros(WIDTH, WIDTH)
    assert not reference.expired(), "graphs of a device hold addresses only"
    program.close()
    assert reference.expired()
