"""`SharedGuard` in core/compilation/shared_trace.py: one trace for values of a guard that decide what is returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import core
from core import InputSpec, Program
from core.compilation.phases import tracer as tracing
from core.compilation.shared_trace import SharedGuard
from core.compilation.trace.traced import OutputRef, OutputTree
from core.compilation.trace.tracing import trace
from core.errors import TraceError, UsageError
from tests.support import compile_with, cpu, refused

INPUTS = {"x": InputSpec(("n", 4), torch.float32), "noise": InputSpec(("n", 4), torch.float32)}
SHARED = SharedGuard(name="way", values=("plain", "noisy"))
WEIGHT = torch.linspace(-1, 1, 16).reshape(4, 4)


def outcome(hidden: Tensor, noise: Tensor, way: str) -> tuple[Tensor, Tensor]:
    return (hidden + noise if way == "noisy" else hidden.relu()), hidden


def model(x: Tensor, noise: Tensor, way: Any = "plain", scale: int = 1) -> Any:
    hidden = x @ WEIGHT * scale
    if isinstance(way, tuple):
        return {each: outcome(hidden, noise, each) for each in way}
    return (hidden * 2, hidden) if way == "double" else outcome(hidden, noise, way)


def compiled(function: Callable[..., Any] = model, **options: Any) -> Program:
    options = {
        "inputs": INPUTS,
        "buckets": [1, 4],
        "lowering": "inline",
        "guards": {"way": ("plain", "noisy", "double")},
        "shared_guard": SHARED,
    } | options
    return compile_with(function, cpu(), **options)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values of the guard that the model is traced with."""
    asked: list[Any] = []

    def noting(*args: Any, constants: dict[str, Any], **options: Any) -> Any:
        asked.append(constants.get("way"))
        return trace(*args, constants=constants, **options)

    monkeypatch.setattr(tracing, "trace", noting)
    return asked


def example(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {name: torch.randn(rows, 4, generator=generator) for name in INPUTS}


@pytest.mark.parametrize("buckets", [[1, 4], [2, 8]])
def test_one_trace_serves_the_values_that_are_named_and_no_other(traced: list[Any], buckets: list[int]) -> None:
    program = compiled(buckets=buckets)
    assert traced == [("plain", "noisy"), "double"]
    assert [(each.trace_of, each.trace_s > 0) for each in program.report().traces] == [
        ("", True),
        ("main", False),
        ("", True),
    ]
    assert program.report().num_traces == 2 and "of the trace of main" in str(program.report())
    for rows in (1, 2, buckets[-1]):
        for way in ("plain", "noisy", "double"):
            given = example(rows)
            torch.testing.assert_close(
                program(**given, guards={"way": way}), model(**given, way=way), rtol=1e-6, atol=1e-6
            )


def test_a_graph_holds_what_its_value_needs_alone() -> None:
    given, dynamic = example(4), {"x": [0], "noise": [0]}
    whole = trace(model, given, dynamic=dynamic, constants={"way": SHARED.values})
    text = whole.module.print_readable(print_output=False)
    for way in SHARED.values:
        alone = trace(model, given, dynamic=dynamic, constants={"way": way})
        mine = SHARED.for_value(whole, way)
        ops = [
            [(n.op, str(n.target)) for n in each.module.graph.nodes if n.op != "placeholder"] for each in (mine, alone)
        ]
        assert ops[0] == ops[1]
        assert len(mine.slots) == len(mine.module.graph.find_nodes(op="placeholder")) == len(alone.slots)
        assert [each.dim() for each in mine.outputs] == [each.dim() for each in alone.outputs]
        assert mine.output.spec == alone.output.spec
        found = mine.module(*mine.values(given))
        for ours, theirs in zip(mine.output.rebuild(found, given), model(**given, way=way), strict=True):
            assert torch.equal(ours, theirs)
    assert whole.module.print_readable(print_output=False) == text


def test_writes_of_the_common_part_stay_whichever_value_is_asked_for() -> None:
    seen = torch.zeros(4)

    def writing(x: Tensor, noise: Tensor, way: Any = "plain") -> Any:
        seen.add_(x.sum(0))
        return {each: (x + (noise if each == "noisy" else 0),) for each in way}

    given = example(4)
    whole = trace(writing, given, constants={"way": SHARED.values})
    assert SHARED.why_not(whole) is None
    for way in SHARED.values:
        mine, before = SHARED.for_value(whole, way), seen.clone()
        mine.module(*mine.values(given))
        torch.testing.assert_close(seen - before, given["x"].sum(0))


def drawing(hidden: Tensor, way: str) -> tuple[Tensor]:
    return (hidden + torch.rand_like(hidden) if way == "noisy" else hidden - torch.rand_like(hidden),)


def changing(hidden: Tensor, way: str) -> tuple[Tensor]:
    if way == "plain":
        return (hidden.relu(),)
    changed = hidden.clone()
    changed[0] = 5
    return (changed,)


@pytest.mark.parametrize("outcomes", [drawing, changing])
def test_values_of_which_one_draws_or_writes_are_traced_apart(
    outcomes: Callable[[Tensor, str], tuple[Tensor]], traced: list[Any]
) -> None:
    def whole(x: Tensor, noise: Tensor, way: Any = "plain") -> Any:
        hidden = x @ WEIGHT
        return {each: outcomes(hidden, each) for each in way} if isinstance(way, tuple) else outcomes(hidden, way)

    program, given = compiled(whole, guards={"way": SHARED.values}, buckets=[4]), example(4)
    assert traced == [SHARED.values, *SHARED.values] and program.report().num_traces == 2
    for way in SHARED.values:
        torch.manual_seed(0)
        found = program(**given, guards={"way": way})
        torch.manual_seed(0)
        torch.testing.assert_close(found, whole(**given, way=way), rtol=1e-6, atol=1e-6)


def test_a_model_that_returns_no_dict_of_the_values_is_refused() -> None:
    def ignoring(x: Tensor, noise: Tensor, way: Any = "plain") -> tuple[Tensor, ...]:
        return x + 1, x - 1

    with refused(TraceError, "way=('plain', 'noisy')", "return a dict from each of these values"):
        compiled(ignoring, guards={"way": SHARED.values}, mode="compile")


def test_phases_of_one_callable_have_traces_of_their_own_and_none_is_a_value(traced: list[Any]) -> None:
    def scaled(x: Tensor, noise: Tensor, way: Any = "plain", scale: Any = 1) -> Any:
        found = {None: (torch.ones_like(x, dtype=torch.int64) * scale,), "noisy": (x + noise,)}
        return found if isinstance(way, tuple) else found[None if way == "plain" else way]

    program = compiled(
        {"a": scaled, "b": scaled, "c": scaled},
        buckets={"a": [4], "b": [4], "c": [4]},
        guards={"a": {"way": (None, "noisy"), "scale": (1,)}, "b": {"way": (None,), "scale": (1.0,)}},
        shared_guard=replace(SHARED, values=(None, "noisy")),
    )
    given = example(4)
    assert program("a", **given, guards={"way": None, "scale": 1})[0].dtype == torch.int64
    assert program("b", **given, guards={"way": None, "scale": 1.0})[0].dtype == torch.float32
    assert torch.equal(program("c", **given)[0], torch.ones(4, 4, dtype=torch.int64))
    assert program.report().num_traces == 3


def test_output_classes_are_made_of_tensors_alone() -> None:
    made: list[type] = []

    def unflatten(values: Any, context: Any) -> Any:
        made.extend(map(type, values))
        return Held(*values)

    pytree.register_pytree_node(Held, lambda held: ([held.tensor], None), unflatten, serialized_type_name="tests.Held")
    try:
        whole = trace(model, example(4), constants={"way": SHARED.values})
        leaf = whole.output.leaves[0]
        spec = pytree.tree_structure({way: Held(torch.zeros(1)) for way in SHARED.values})
        held = replace(whole, output=OutputTree((leaf, whole.output.leaves[2]), spec))
        made.clear()
        assert SHARED.for_value(held, "noisy").output.leaves == (OutputRef(index=0),)
        assert OutputRef not in made
    finally:
        pytree._deregister_pytree_node(Held)


class Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_an_output_that_is_an_input_or_a_number_stays() -> None:
    def returning(x: Tensor, noise: Tensor, way: Any = "plain") -> Any:
        found = {"plain": {"same": noise, "sum": x + 1}, "noisy": {"sum": x - 1, "number": 3}}
        return found if isinstance(way, tuple) else found[way]

    program = compiled(returning, guards={"way": SHARED.values})
    given = example(4)
    plain, noisy = (program(**given, guards={"way": way}) for way in SHARED.values)
    assert torch.equal(plain["same"], given["noise"]) and torch.equal(plain["sum"], given["x"] + 1)
    assert torch.equal(noisy["sum"], given["x"] - 1) and noisy["number"] == 3


def test_other_guards_have_traces_of_their_own(traced: list[Any]) -> None:
    program = compiled(guards={"way": SHARED.values, "scale": (1, 2)})
    assert traced == [SHARED.values] * 2
    given = example(4)
    for scale in (1, 2):
        for way in SHARED.values:
            found = program(**given, guards={"way": way, "scale": scale})
            torch.testing.assert_close(found, model(**given, way=way, scale=scale), rtol=1e-6, atol=1e-6)


def test_a_model_that_counts_is_traced_for_each_value(traced: list[Any]) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor, noise: Tensor, way: Any = "plain") -> Any:
            self.calls += 1
            return model(x + self.calls, noise, way)

    counting, given = Counting().eval(), example(4)
    program = compiled(counting, guards={"way": SHARED.values}, mode="compile", buckets=[4])
    for number, way in enumerate(("plain", "noisy", "plain", "noisy"), 1):
        found = program(**given, guards={"way": way})
        torch.testing.assert_close(found, model(given["x"] + number, given["noise"], way), rtol=1e-6, atol=1e-6)
    assert counting.calls == 4


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"name": "absent"}, ("('plain', 'noisy') of guard 'absent'", "no such guard")),
        ({"values": ("plain", "other")}, ("captured for: 'plain', 'noisy', 'double'",)),
        ({"values": ("plain",)}, ("give a tuple of two of these values or more, each once",)),
        ({"values": ("plain", "plain")}, ("give a tuple of two of these values or more, each once",)),
        ({"values": ["plain", "noisy"]}, ("['plain', 'noisy'] of guard", "give a tuple of two of these values")),
    ],
)
def test_values_that_can_not_be_shared_are_refused(changes: dict[str, Any], phrases: tuple[str, ...]) -> None:
    with refused(UsageError, "sharing a trace between", *phrases):
        compiled(shared_guard=replace(SHARED, **changes))


@pytest.mark.usefixtures("cache_folder")
def test_the_values_are_part_of_what_the_compile_cache_asks() -> None:
    module = Module().eval()
    states = []
    for shared in (SHARED, SHARED, None):
        with_it = {} if shared is None else {"shared_guard": shared}
        program = core.compile(
            module,
            "cpu",
            inputs=INPUTS,
            buckets=[4],
            options=core.CompileOptions(guards={"way": SHARED.values}, lowering="inline", cache=True, **with_it),
        )
        states.append((program.report().cache.state, program.report().num_traces))
        given = example(4)
        for way in SHARED.values:
            torch.testing.assert_close(program(**given, guards={"way": way}), module(**given, way=way))
    assert states == [("miss", 1), ("hit", 0), ("miss", 2)]


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(WEIGHT.clone())

    def forward(self, x: Tensor, noise: Tensor, way: Any = "plain") -> Any:
        hidden = x @ self.weight
        return {e: outcome(hidden, noise, e) for e in way} if isinstance(way, tuple) else outcome(hidden, noise, way)
