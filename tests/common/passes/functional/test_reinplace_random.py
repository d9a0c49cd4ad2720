"""Random programs of in-place ops: functionalised, shuffled as a pass may, put in place again, and compared each time.

The program itself shows that no copy is needed where it needs none: its functional graph must get none back.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.passes.effects import written_args
from core.common.passes.functional.reinplace import reinplace
from core.common.passes.pass_guards import Form
from core.compilation.rewrite.aten import to_functional
from tests.common.passes.functional.reinplace_cases import EACH, FORMS, INC, MIX, OWN, aten

NUM_INPUTS = 3
INDEX = torch.tensor([2, 0])
CHOICES = ("new", "slice", "column", "inc", "own", "mix", "each", "add_", "put_", "copy_", "read", "clone")


class Program:
    """A graph of 4 x 4 tensors, built step by step; each step runs on real tensors too, so that views are known."""

    def __init__(self, seed: int, *, aliases: bool) -> None:
        self.random = random.Random(seed)
        self.aliases = aliases
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Tensor] = {}
        mode = FakeTensorMode()
        for index in range(NUM_INPUTS):
            node = self.graph.placeholder(f"x{index}")
            self.values[node] = torch.arange(16.0).view(4, 4) + index
            node.meta["example_value"] = mode.from_tensor(self.values[node])
        self.index = self.graph.placeholder("index")
        self.index.meta["example_value"] = mode.from_tensor(INDEX)

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        try:
            value = target(*fx.map_arg(args, lambda n: self.values.get(n, INDEX)))
        except RuntimeError as error:  # torch refuses to write a tensor from a part of it that lies otherwise
            assert self.aliases and "single memory location" in str(error)
            self.graph.erase_node(node)
            return node
        if isinstance(value, Tensor):
            self.values[node] = value
        return node

    def pick(self, *, not_of: tuple[fx.Node, ...] = (), full: bool = False) -> fx.Node | None:
        """Return a tensor, none in the memory of the others unless the program may do that."""
        taken = {self.values[node].untyped_storage()._cdata for node in not_of}
        fits = [n for n, v in self.values.items() if v.dim() == 2 and (not full or v.shape == (4, 4))]
        if not self.aliases:
            fits = [n for n in fits if self.values[n].untyped_storage()._cdata not in taken]
        return self.random.choice(fits) if fits else None

    def step(self, kind: str) -> None:
        old = self.pick(full=kind in ("inc", "mix", "each", "put_", "copy_", "new"))
        other = None if old is None else self.pick(not_of=(old,), full=True)
        if old is None or other is None:
            return
        views: dict[str, Callable[[], object]] = {
            "new": lambda: self.call(torch.mul, old, 2),
            "read": lambda: self.call(torch.add, old, 1),
            "clone": lambda: self.call(torch.clone, old),
            "slice": lambda: self.call(operator.getitem, old, slice(0, 2)),
            "column": lambda: self.call(operator.getitem, old, (slice(None), slice(1, 3))),
            "transpose": lambda: self.call(torch.transpose, old, 0, 1),
            "inc": lambda: self.call(INC, old, other),
            "own": lambda: self.call(OWN, old),
            "mix": lambda: self.call(MIX, old, other),
            "each": lambda: self.call(EACH, [old], other),
            "add_": lambda: self.call(torch.Tensor.add_, old, 1),
            "put_": lambda: self.call(torch.Tensor.index_fill_, old, 0, self.index, 3.0),
            "copy_": lambda: self.call(torch.Tensor.copy_, old, other),
        }
        views[kind]()

    def module(self, num_outputs: int) -> fx.GraphModule:
        nodes = [n for n, v in self.values.items() if v.dim() == 2]
        self.graph.output(tuple(self.random.sample(nodes, min(num_outputs, len(nodes)))))
        return fx.GraphModule({}, self.graph)


def build(seed: int, kinds: list[str], *, aliases: bool) -> fx.GraphModule:
    program = Program(seed, aliases=aliases)
    for kind in kinds:
        program.step(kind)
    return program.module(3)


def run(module: fx.GraphModule) -> tuple[list[Tensor], list[bool]]:
    """Return outputs and all inputs afterwards, and which output lies in an input's memory."""
    inputs = [torch.arange(16.0).view(4, 4) / 7 + index for index in range(NUM_INPUTS)]
    outputs = list(module(*inputs, INDEX))
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    return [*outputs, *inputs], [output.untyped_storage()._cdata in memory for output in outputs]


def compare(module: fx.GraphModule, wanted: tuple[list[Tensor], list[bool]]) -> None:
    module.recompile()
    got = run(module)
    assert all(map(torch.equal, got[0], wanted[0])), module.graph
    assert got[1] == wanted[1], module.graph


def shuffle(module: fx.GraphModule, seed: int) -> None:
    """Order the nodes anew, as any pass may that sees no writes; the copies into inputs stay at the end."""
    chance = random.Random(seed)
    body = [n for n in module.graph.nodes if n.op == "call_function" and not written_args(n)]
    writes = [n for n in module.graph.nodes if n.op == "call_function" and written_args(n)]
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    placed, last = set(inputs), inputs[-1]
    # What views an input after the copies must stay after them.
    late = {n for n in body if writes and n > writes[0]}
    left = [n for n in body if n not in late]
    while left:
        ready = [n for n in left if all(source in placed for source in n.all_input_nodes)]
        node = chance.choice(ready)
        last.append(node)
        last = node
        placed.add(node)
        left.remove(node)


programs = st.lists(st.sampled_from(CHOICES), min_size=4, max_size=14)


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), kinds=programs)
def test_what_was_in_place_is_in_place_again(form: Form, seed: int, kinds: list[str]) -> None:
    module = build(seed, kinds, aliases=False)
    wanted = run(module)
    functional = to_functional(module, form)
    compare(functional, wanted)
    num_clones = sum(n.target is torch.clone for n in module.graph.nodes)
    done = reinplace(functional)
    compare(functional, wanted)
    assert done.clones == (), (module.graph, functional.graph)
    assert sum(n.target is aten.clone.default for n in functional.graph.nodes) <= num_clones


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), kinds=st.lists(st.sampled_from((*CHOICES, "transpose")), min_size=4, max_size=14))
def test_any_functional_graph_keeps_its_meaning(form: Form, seed: int, kinds: list[str]) -> None:
    """Also where arguments share memory, nodes are in another order and the model's own copies are gone."""
    functional = to_functional(build(seed, kinds, aliases=True), form)
    for node in list(functional.graph.nodes):
        source = node.args[0] if node.args else None
        if node.target is aten.clone.default and isinstance(source, fx.Node) and source.op != "placeholder":
            node.replace_all_uses_with(source)
            functional.graph.erase_node(node)
    shuffle(functional, seed)
    functional.graph.lint()
    functional.recompile()
    wanted = run(functional)
    reinplace(functional)
    functional.graph.lint()
    compare(functional, wanted)
