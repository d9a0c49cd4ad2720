"""core/compilation/capture/alike.py: graphs that begin alike are compiled in two parts, the beginning once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings, inline
from core.common.under_way import Steps
from core.compilation.capture.alike import Cut, Part, cuts, divide
from core.compilation.phases.divided import Divided
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from tests.support import cpu

WAYS = ("plain", "noisy", "rows")
GIVEN = {"x": torch.randn(3, 8), "noise": torch.randn(3, 8)}
INPUTS = {name: InputSpec(("n", 8), torch.float32) for name in GIVEN}


class Model(nn.Module):
    """A body that all ways share, and an end for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, noise: Tensor, way: Any = "plain") -> tuple[Tensor, ...]:
        hidden = x
        for _ in range(4):
            hidden = torch.sin(hidden @ self.weight) + x
        if way == "writing":
            self.seen.add_(hidden.sum(0))
            return hidden * self.seen, hidden
        if way == "other":
            return torch.cos(x * noise), hidden
        if way.startswith("viewed"):
            turned = x.t()
            return (turned * noise.t() if way == "viewed" else turned - noise.t()), hidden
        if way.startswith("mean"):
            wide = hidden.mean(1, keepdim=True).expand(-1, 8)
            return (wide * noise if way == "mean" else wide - noise), hidden
        if way == "transposed":
            turned = hidden.t()
            return (turned + noise.t()).relu(), turned
        if way == "prefix":
            return (hidden,)
        if way == "rows":
            return hidden * x.shape[0] + 1, hidden
        return (((hidden + noise) * 2).relu() if way == "noisy" else hidden.relu()), hidden


def traced(model: Model, ways: Sequence[str]) -> list[TracedGraph]:
    dynamic = {name: [0] for name in GIVEN}
    return [trace(model, GIVEN, dynamic=dynamic, constants={"way": way}) for way in ways]


def calls(graph: TracedGraph) -> int:
    return sum(node.op == "call_function" or node.op == "call_method" for node in graph.module.graph.nodes)


def test_graphs_that_begin_alike_are_cut_at_the_same_place() -> None:
    graphs = traced(Model(), WAYS)
    for graph, cut in zip(graphs, cuts(graphs), strict=True):
        assert cut is not None and cut.num_calls == 12
        (handed,) = cut.handed
        rows, columns = handed.shape
        assert (handed.index, handed.dtype, columns, handed.stride) == (11, "float32", 8, (8, 1))
        assert rows in {symbol.name for symbol in graph.symbols}
        assert Cut.from_json(json.loads(json.dumps(cut.to_json()))) == cut
    assert [calls(graph) - 12 for graph in graphs] == [1, 3, 2]


@pytest.mark.parametrize(
    ("ways", "why"),
    [
        (("plain",), "it is alone"),
        (("plain", "other"), "cos comes first there, so the order differs before the end"),
        (("viewed", "viewed more"), "what is handed on is a view of an input"),
        (("mean", "mean more"), "what is handed on has one number in several places"),
    ],
)
def test_what_is_not_cut(ways: tuple[str, ...], why: str) -> None:
    model = Model()
    if "other" in ways:

        def early(x: Tensor, noise: Tensor, way: str) -> tuple[Tensor, ...]:
            first = torch.cos(x * noise) if way == "other" else x.relu()
            return first, model(x, noise)[1]

        graphs = [trace(early, GIVEN, constants={"way": way}) for way in ways]
    else:
        graphs = traced(model, ways)
    assert set(cuts(graphs)) == {None}, why


def test_another_weight_is_no_common_beginning() -> None:
    graphs = [*traced(Model(), ("plain",)), *traced(Model(), ("noisy",))]
    assert set(cuts(graphs)) == {None}


@pytest.mark.parametrize("way", [*WAYS, "transposed", "writing", "prefix"])
def test_the_parts_give_the_numbers_of_the_whole(way: str) -> None:
    model = Model()
    graphs = traced(model, dict.fromkeys((*WAYS, way)))
    index = [*dict.fromkeys((*WAYS, way))].index(way)
    graph, cut = graphs[index], cuts(graphs)[index]
    assert cut is not None
    first, end, outputs = divide(graph.module, cut)
    assert len(first.graph.graph.find_nodes(op="placeholder")) == len(first.takes)
    for rows in (2, 3, 5):
        given = {name: torch.randn(rows, 8) for name in GIVEN}
        values = graph.values(given)
        handed = end.examples(values, graph.sizes(given), torch.device("cpu"))
        assert handed[0].shape == (rows, 8)
        run = Divided((first.graph.forward, first), (end.graph.forward, end), outputs, handed)
        for again in (run, run.bind(*values)):
            before = model.seen.clone()
            expected = model(**given, way=way)
            after = model.seen.clone()
            model.seen.copy_(before)
            found = again(*values) if again is run else again()
            for ours, theirs in zip(graph.output.rebuild(found, given), expected, strict=True):
                assert torch.equal(ours, theirs)
            assert torch.equal(model.seen, after)


def test_a_result_in_another_layout_is_laid_out_as_the_end_expects() -> None:
    graphs = traced(Model(), ("plain", "noisy"))
    graph, cut = graphs[1], cuts(graphs)[1]
    assert cut is not None
    first, end, outputs = divide(graph.module, cut)
    values = graph.values(GIVEN)
    seen: list[tuple[int, ...]] = []

    def turned(*args: Any) -> tuple[Tensor, ...]:
        return tuple(each.t().contiguous().t() for each in first.graph.forward(*args))

    def noting(*args: Any) -> tuple[Tensor, ...]:
        seen.append(args[0].stride())
        return end.graph.forward(*args)  # type: ignore[no-any-return]

    handed = end.examples(values, graph.sizes(GIVEN), torch.device("cpu"))
    found = Divided((turned, first), (noting, end), outputs, handed)(*values)
    assert seen == [(8, 1)]
    torch.testing.assert_close(
        graph.output.rebuild(found, GIVEN), Model.forward(_model_of(graph), **GIVEN, way="noisy")
    )


def _model_of(graph: TracedGraph) -> Any:
    model = Model()
    weights = [slot.value for slot in graph.slots if getattr(getattr(slot, "value", None), "shape", None) == (8, 8)]
    model.weight = weights[0]
    return model


class Compiler:
    """A lowering in steps, which notes how many calls each graph has that it has to compile."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, request: LoweringRequest) -> FlatCallable:
        raise AssertionError("it is asked to begin")

    def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
        number = sum(node.op.startswith("call") for node in request.graph.graph.nodes)

        def make(folder: Any) -> Steps[None]:
            self.made.append(number)
            yield lambda: True
            (folder / "made").write_text("")

        yield from request.artifacts.begin({}, make, lambda folder: None)
        return inline(request)


def start(compiler: Compiler, model: Model, ways: Sequence[str], *, cache: bool) -> core.Program:
    lowerings = Lowerings(available={"acme": compiler}, default="acme", begins={"acme": compiler.begin})
    options = core.CompileOptions(guards={"way": tuple(ways)}, cache=cache)
    return core.compile(model, cpu(lowerings=lowerings), inputs=INPUTS, buckets=[2, 4], options=options)


@pytest.mark.usefixtures("cache_folder")
def test_a_beginning_is_compiled_once_for_each_bucket() -> None:
    model = Model().eval()
    compiler = Compiler()
    program = start(compiler, model, WAYS, cache=True)
    beginning = max(compiler.made)
    assert sorted(compiler.made) == 2 * [2] + 2 * [3] + 2 * [beginning]  # an end of one call is called
    assert beginning > 12  # passes have added calls
    for rows in (2, 4):  # one of the ways multiplies by their number, which padding changes
        given = {name: torch.randn(rows, 8) for name in GIVEN}
        for way in WAYS:
            expected = model(**given, way=way)
            torch.testing.assert_close(program(**given, guards={"way": way}), expected, rtol=1e-3, atol=1e-3)
    program.close()
    again = Compiler()
    program = start(again, model, WAYS, cache=True)
    assert again.made == [] and program.report().cache.state == "hit"
    found, expected = program(**GIVEN, guards={"way": "noisy"}), model(**GIVEN, way="noisy")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("refused", [False, True])
def test_without_a_cache_that_keeps_it_nothing_is_shared(
    refused: bool, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, compiler = Model().eval(), Compiler()
    cache_folder.mkdir(mode=0o700)
    cache_folder.chmod(0o777 if refused else 0o700)  # others could write there
    program = start(compiler, model, WAYS, cache=refused)
    assert program.report().cache.state == ("refused" if refused else "off")
    least = min(compiler.made)
    assert least > 13 and sorted(compiler.made) == sorted(2 * [least, least + 2, least + 1])


@pytest.mark.parametrize(("body", "expected"), [(lambda x: x.relu(), True), (lambda x: x.relu() + 1, False)])
def test_an_end_of_one_call_is_short(body: Any, expected: bool) -> None:
    assert Part(torch.fx.symbolic_trace(body), (0,)).is_short((torch.ones(2),)) is expected


def test_an_end_that_no_fake_tells_of_is_left_to_the_compiler() -> None:
    def reads(x: Tensor) -> Tensor:
        return x * float(x.sum())

    graph = torch.fx.Graph()
    graph.output((graph.call_function(reads, (graph.placeholder("x"),)),))
    assert not Part(torch.fx.GraphModule(nn.Module(), graph), (0,)).is_short((torch.ones(2),))
