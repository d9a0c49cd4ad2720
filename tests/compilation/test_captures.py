"""Captured programs in use: guards, bound inputs, eager fallbacks, serving, moved weights, failures, threads."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.device import Mode
from core.errors import CaptureError, UsageError
from tests.recording import acme, graph_bytes
from tests.support import compile_with, cpu, refused

ROWS = {"x": InputSpec(("n", 4), torch.float32)}
MODES: tuple[Mode, ...] = ("full", "segmented")


def compiled(model: Any, mode: Any = "full", **options: Any) -> Program:
    options = {"inputs": ROWS, "buckets": [4, 8], "passes": ()} | options
    return compile_with(model, options.pop("device", acme(update=False)), mode=mode, **options)


def rows(count: int, value: float = 1.0) -> Tensor:
    return torch.full((count, 4), value)


def guarded(x: Tensor, sampling: str = "greedy", lora: bool = False) -> Tensor:
    return x * (2 if sampling == "greedy" else 3) + (10 if lora else 0)


@pytest.mark.parametrize("mode", MODES)
def test_each_combination_of_guards_replays_its_own_graph(mode: Mode) -> None:
    values = {"sampling": ("greedy", "random"), "lora": (False, True)}
    program = compiled(guarded, mode, guards=values)
    assert len(program.keys) == 2 * 4
    for _ in range(2):
        for sampling in values["sampling"]:
            for lora in values["lora"]:
                chosen = {"sampling": sampling, "lora": lora}
                assert torch.equal(program(x=rows(3), guards=chosen), guarded(rows(3), **chosen))
    assert sorted(program.report().replays.values()) == [0] * 4 + [2] * 4
    assert str(program.keys[-1]) in json.dumps(program.report().to_json())


def test_guards_may_differ_by_phase() -> None:
    program = compiled(
        guarded,
        buckets={"decode": [4], "prefill": [8]},
        guards={"decode": {"sampling": ("greedy", "random")}, "prefill": {"lora": (True,)}},
    )
    assert program("decode", x=rows(2), guards={"sampling": "random"}).tolist() == [[3] * 4] * 2
    assert program("prefill", x=rows(5), guards={"lora": True}).tolist() == [[12] * 4] * 5
    with refused(UsageError, "phase 'prefill' with guards ['sampling']", "lora in [True]"):
        program("prefill", x=rows(2), guards={"sampling": "random"})


@pytest.mark.parametrize("guards", [None, {}, {"sampling": "greedy", "lora": True}, {"lora": True}])
def test_a_call_names_exactly_the_guards(guards: Mapping[str, Any] | None) -> None:
    program = compiled(guarded, guards={"sampling": ("greedy",)}, buckets=[4])
    with refused(UsageError, "with guards", "sampling in ['greedy']", "exactly these"):
        program(x=rows(2), guards=guards)


def test_a_guard_value_that_was_not_captured_runs_eagerly_or_is_refused() -> None:
    program = compiled(guarded, guards={"sampling": ("greedy",)}, buckets=[4])
    assert program(x=rows(2), guards={"sampling": "random"}).tolist() == [[3] * 4] * 2
    ((reason, count),) = program.report().fallbacks.items()
    assert "sampling = random" in reason and "not captured with sampling = random" in reason and count == 1
    strict = compiled(guarded, guards={"sampling": ("greedy",)}, buckets=[4], strict=True)
    with refused(
        CaptureError, "sampling = random", "not captured with sampling = random", "core.CompileOptions(guards={"
    ):
        strict(x=rows(2), guards={"sampling": "random"})
    with refused(UsageError, "guards='random'", "a str", "give a mapping"):
        strict(x=rows(2), guards="random")
    with refused(UsageError, "can't be hashed"):
        strict(x=rows(2), guards={"sampling": ["random"]})


def test_a_call_without_a_graph_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    program = compiled(lambda x: x * 2)
    with caplog.at_level(logging.WARNING, "core"):
        for _ in range(3):
            assert program(x=rows(9)).shape == (9, 4)
    assert len([r for r in caplog.records if "runs eagerly" in r.getMessage()]) == 1
    ((reason, count),) = program.report().fallbacks.items()
    assert count == 3 and "'n': 9" in caplog.text and "no bucket is that large" in reason
    assert f"ran eagerly 3 times: {reason}" in str(program.report())
    assert sum(program.report().replays.values()) == 0


def test_strict_refuses_a_call_without_a_graph() -> None:
    program = compiled(lambda x: x * 2, strict=True)
    with refused(CaptureError, "n = 9", "no bucket", "larger bucket"):
        program(x=rows(9))
    assert not program.report().fallbacks


def tripling() -> Callable[[Tensor], Tensor]:
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    torch._dynamo.reset_code(tripled.__code__)
    return torch.compile(tripled, backend="eager", dynamic=False)


def test_a_compile_while_serving_is_counted_and_named() -> None:
    fn = tripling()

    def model(x: Tensor) -> Tensor:
        return fn(x) if x.shape[0] > 4 else x * 3

    program = core.capture(model, acme(), inputs=ROWS, buckets=[4], options=core.CompileOptions(eager=()))
    with program.serving():
        program(x=rows(4))
        assert program.report().compiles == {}
        assert torch.equal(program(x=rows(9)), rows(9, 3)) and torch.equal(program(x=rows(9)), rows(9, 3))
    ((name, count),) = program.report().compiles.items()
    assert name.startswith("tripled (test_captures.py:") and count == 1
    assert f"compiled while serving, 1 time: {name}" in str(program.report())


@pytest.mark.parametrize("mode", ["off", "segmented", "compile"])
def test_a_compile_while_serving_is_an_error_in_strict_mode(mode: Mode) -> None:
    fn, calls = tripling(), [0]

    @core.eager_break
    def step(x: Tensor) -> Tensor:
        calls[0] += 1
        return fn(x[: 1 + calls[0] // 100]).sum() + x

    device = cpu() if mode == "compile" else acme()
    program = core.capture(step, device, inputs=ROWS, buckets=[4], mode=mode, strict=True)
    program(x=rows(4))
    with program.serving():
        program(x=rows(4))
        calls[0] = 100  # a shape that was not compiled
        with refused(CaptureError, "serving without compiles", "torch compiled tripled"):
            program(x=rows(4))
        program(x=rows(4))
    assert sum(program.report().compiles.values()) == 1


class Cached(nn.Module):
    """Writes rows into a cache that the caller owns, and reads them back."""

    def forward(self, x: Tensor, slots: Tensor, cache: Tensor) -> Any:
        cache.index_copy_(0, slots, x)
        return cache[slots] * 2, cache


BOUND = {
    **ROWS,
    "slots": InputSpec(("n",), torch.int64, padding="sentinel", value=15),
    "cache": InputSpec((16, 4), torch.float32, padding="bound"),
}


@pytest.mark.parametrize("mode", [*MODES, "piecewise", "off"])
def test_a_bound_input_is_written_in_place_and_never_copied(mode: Mode) -> None:
    cache = torch.zeros(16, 4)
    program = compiled(Cached(), mode, inputs=BOUND, bound={"cache": cache}, eager=())
    cache.zero_()
    for call in range(3):
        slots = torch.arange(3) + call
        given = {"cache": cache} if call % 2 else {}
        out, returned = program(x=rows(3, call + 1.0), slots=slots, **given)
        assert torch.equal(out, rows(3, 2.0 * (call + 1))) and returned is cache
    assert cache[:5, 0].tolist() == [1, 2, 3, 3, 3] and not cache[5:15].any()
    assert program.report().static_bytes <= 8 * (4 * 4 + 8), "the cache has no static buffer"


def test_another_tensor_than_the_bound_one_is_refused() -> None:
    cache = torch.zeros(16, 4)
    program = compiled(Cached(), inputs=BOUND, bound={"cache": cache})
    with refused(CaptureError, "input 'cache' at", "it is bound", "in place"):
        program(x=rows(3), slots=torch.arange(3), cache=cache.clone())
    for bound in ({}, {"cache": cache, "x": rows(4)}, {"cache": cache[:8]}, {"cache": cache.half()}):
        with refused(UsageError, "bound"):
            compiled(Cached(), inputs=BOUND, bound=bound)


def test_examples_leave_bound_inputs_out() -> None:
    cache = torch.zeros(16, 4)
    examples = [{"x": rows(3), "slots": torch.arange(3)}]
    for mode in ("full", "segmented"):
        verify: Any = "full" if mode == "full" else "off"
        program = compiled(
            Cached(), mode, inputs=BOUND, bound={"cache": cache}, examples=examples, verify=verify, eager=()
        )
        assert program.report().notes == ()


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("mode", MODES)
def test_debug_names_what_has_moved_and_lets_in_place_writes_be(mode: Mode) -> None:
    model = Weighted().eval()
    program = compiled(model, mode, debug=True, buckets=[4])
    x = torch.randn(4, 4)
    with torch.no_grad():
        model.linear.weight.mul_(2)
        model.load_state_dict(Weighted().state_dict())
        assert torch.equal(program(x=x), model(x))
    weight, address = model.linear.weight.data, model.linear.weight.data_ptr()
    model.linear.weight.data = weight.clone()
    with refused(CaptureError, "replaying main[4]", "linear.weight lies at", hex(address)):
        program(x=x)
    model.linear.weight.data = weight
    program(x=x)
    model.scale = torch.ones(4)
    with refused(CaptureError, "scale lies at"):
        program.replay(program.keys[0])


def test_host_arguments_of_the_device_are_asked_for() -> None:
    import core_acme.host_arguments  # noqa: F401  # declares the op

    def fn(x: Tensor) -> Tensor:
        return torch.ops.acme.window_sum(x, [1] * x.shape[0])

    for mode in ("full", "segmented"):
        program = core.capture(fn, acme(), inputs=ROWS, buckets=[4], mode=mode)
        (note,) = program.report().notes
        assert "not checked" in note and "lengths" in note
        with refused(UsageError, "host-side arguments []", "captured with: lengths"):
            program(x=rows(4))
        for lengths in ([1, 2, 3, 4], [0, 0, 4, 4]):
            assert program(x=rows(4), step={"lengths": lengths}).tolist() == lengths
        with refused(UsageError, "['length']", "captured with: lengths"):
            program(x=rows(4), step={"length": [1] * 4})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failing", ["second bucket", "progress", "reset"])
def test_a_failing_compile_leaves_nothing_behind(mode: Mode, failing: str) -> None:
    level, runs = graph_bytes(), [0]

    def progress(what: str, done: int, total: int) -> None:
        if failing == "progress" and done == 1:
            raise ValueError("no terminal")

    def reset() -> None:
        runs[0] += 1
        if failing == "reset" and runs[0] > 4:
            raise ValueError("no cache")

    def fn(x: Tensor) -> Tensor:
        return x * x.sum().item() if failing == "second bucket" and x.shape[0] == 4 else x + 1

    with pytest.raises((CaptureError, ValueError)):
        core.capture(
            fn,
            acme(),
            inputs=ROWS,
            buckets=[4, 8],
            mode=mode,
            options=core.CompileOptions(progress=progress, reset=reset),
        )
    assert graph_bytes() == level
    program = core.capture(lambda x: x * 2, acme(), inputs=ROWS, buckets=[4, 8], mode=mode)
    assert torch.equal(program(x=rows(3)), rows(3) * 2)
    program.close()
    assert graph_bytes() == level


def test_a_program_may_be_closed_twice_and_says_that_it_is() -> None:
    level, program = graph_bytes(), compiled(lambda x: x * 2)
    (key, *_) = program.keys
    program.close(), program.close()
    for use in (
        lambda: program(x=rows(2)),
        *(lambda m=m: getattr(program, m)(key) for m in ("replay", "inputs", "source")),
    ):
        with refused(CaptureError, "it was closed", "compile it again"):
            use()
    assert program.keys == () and graph_bytes() == level and str(program.report())


def test_programs_of_one_process_do_not_meet() -> None:
    first, second = (compiled(lambda x, by=by: x * by, inputs=ROWS) for by in (2, 5))
    kept = first(x=rows(4))
    assert torch.equal(second(x=rows(4)), rows(4, 5)) and torch.equal(kept, rows(4, 2))
    first.close()
    assert torch.equal(second(x=rows(3)), rows(3, 5))


def test_an_output_lives_until_the_next_replay_of_the_program() -> None:
    program = compiled(lambda x: x * 2)
    first = program(x=rows(4))
    program(x=rows(8, 3.0))
    assert not torch.equal(first, rows(4, 2)), "the device poisons what another key's replay may reuse"


def in_threads(*tasks: Callable[[], None]) -> None:
    """Run the tasks at once, and raise what one of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], None]) -> None:
        start.wait()
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) + x


def captured(model: nn.Module) -> Program:
    return core.capture(
        model,
        acme(),
        inputs=ROWS,
        buckets=[2, 4, 8],
        mode="segmented",
        options=core.CompileOptions(eager=("second",), debug=True),
    )


def check_replays(program: Program, model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for count in (2, 8, 4) * 5:
        x = torch.randn(count, 4, generator=generator)
        with torch.no_grad():
            assert torch.equal(program(x=x), model(x))


def test_programs_in_threads_at_once() -> None:
    level, models = graph_bytes(), [Layers().eval() for _ in range(3)]

    def life(number: int) -> None:
        program = captured(models[number])
        check_replays(program, models[number], number)
        program.close()

    in_threads(*(lambda number=number: life(number) for number in range(3)))
    assert graph_bytes() == level


def test_a_capture_in_one_thread_while_another_replays() -> None:
    served, other = Layers().eval(), Layers().eval()
    program = captured(served)

    def serve() -> None:
        with program.serving():
            for seed in range(4):
                check_replays(program, served, seed)

    def prepare() -> None:
        for _ in range(3):
            captured(other).close()

    in_threads(serve, prepare)
    assert program.report().compiles == {} and program.report().fallbacks == {}


def test_two_threads_capture_one_model_at_once() -> None:
    model = Layers().eval()
    programs: list[Program] = []
    in_threads(*(lambda: programs.append(captured(model)) for _ in range(3)))
    assert all("forward" not in module.__dict__ for module in model.modules())
    for program in programs:
        assert [bucket.num_graphs for bucket in program.report().buckets] == [2] * 3
        check_replays(program, model, 7)
