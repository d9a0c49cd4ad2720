"""core/common/passes/functional/reinplace.py: updates run in place again; a copy stays where an old value is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.passes.functional.reinplace import reinplace
from core.common.passes.pass_guards import Form
from core.compilation.rewrite.aten import to_functional
from core.compilation.trace.tracing import trace
from tests.common.passes.functional.reinplace_cases import (
    EACH,
    FORMS,
    INC,
    MIX,
    OWN,
    SOME,
    STORE,
    TWO,
    Fixed,
    aten,
    fix,
)

X = torch.linspace(-2, 2, 24).view(6, 4)
ROWS = torch.linspace(1, 3, 12).view(3, 4)
SLOTS = torch.tensor([1, 4, 0])
IN = {"x": X.clone(), "rows": ROWS, "slots": SLOTS}
both = pytest.mark.parametrize("form", FORMS)


class State(nn.Module):
    """A cache of rows and a count, and what a forward does with them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(24.0).view(6, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._forward = forward

    def forward(self, x: Tensor, rows: Tensor, slots: Tensor) -> Any:
        return self._forward(self, x, rows, slots)


def fixed(forward: Callable[..., Any], form: Form, **options: Any) -> Fixed:
    # Copies: Dynamo marks tensors whose sizes are to be symbolic.
    return fix(State(forward), {name: value.clone() for name, value in IN.items()}, form, **options)


# --- no copy is left


def temporary(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    h = x * 2
    INC(h, x)
    INC(h, h + 1)
    return h * 3


def buffer(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    INC(s.cache, x)
    OWN(s.cache)
    return s.cache[1:] + 1


def only_written(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    STORE(rows, s.cache, slots, out)
    return out + 1


def joined_projection(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Write query and key, two views of one buffer, and read the value, a third, later."""
    qkv = torch.cat([x, x + 1, x + 2], -1)
    q, k, v = qkv[:, :4], qkv[:, 4:8], qkv[:, 8:]
    return MIX(q, k) + (q * k).sum() + v.sum()


def split_projection(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    q, k, v = torch.cat([x, x + 1, x + 2], -1).split([4, 4, 4], -1)
    return MIX(q, k) + (q * k).sum() + v.sum()


def heads(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Write views that no slice makes: of heads, transposed."""
    qk = (x * 2).view(6, 2, 2).transpose(0, 1)
    return MIX(qk[0], qk[1]) + qk.sum()


def parts_of_a_buffer(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    INC(s.cache[:3], rows)
    INC(s.cache[3:], rows * 2)
    return s.cache.sum(-1)


def list_of_tensors(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    first, second = x + 1, x + 2
    EACH([first, second, s.cache], x)
    return first * second


def optional(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    first, second = x + 1, x + 2
    SOME(None, first)
    SOME(second, first)
    return first * second


def several_results(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    h = x + 1
    before, after = TWO(h, by=3.0)
    return before, after, h


def aten_cache(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """What a static cache of transformers does."""
    s.cache.index_copy_(0, slots, rows)
    s.count.add_(3)
    return (s.cache * x).sum(-1)


def aten_views(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    s.cache[:, 1:3].mul_(2)
    s.cache[2].add_(1)
    s.cache[:, 3] = x[:, 0]
    s.cache[slots] = rows
    return s.cache + 1


def aten_temporary(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    h = x * 2
    h[slots] = rows
    h[:, :2] += 1
    return h * 3


def returned(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    INC(s.cache, x)
    return s.cache, s.cache[2:]


def elementwise_self(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    s.cache.mul_(s.cache)
    return s.cache + x


def read_before(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    h = x + 1
    OWN(h)
    a = h + 1
    OWN(h)
    return a * h


def other_part_needed(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Read, of the old value, only what is not written."""
    h = x + 1
    rest = h[3:]
    INC(h[:3], rows)
    return rest.exp() * h[:3]


FREE = [
    *(temporary, buffer, only_written, joined_projection, split_projection, parts_of_a_buffer, list_of_tensors),
    *(optional, several_results, aten_cache, aten_temporary, returned, elementwise_self, read_before),
    other_part_needed,
]


@pytest.mark.cases(3)
@both
@pytest.mark.parametrize("forward", FREE, ids=lambda each: each.__name__)
def test_no_copy_is_left(forward: Callable[..., Any], form: Form) -> None:
    found = fixed(forward, form)
    assert (found.copies, found.done.clones) == ((), ())
    assert found.done.functionalized == len(found.done.sites) > 0


@pytest.mark.cases(2)
@both
@pytest.mark.parametrize("forward", [joined_projection, split_projection, temporary], ids=lambda f: f.__name__)
def test_no_copy_is_left_of_any_number_of_rows(forward: Callable[..., Any], form: Form) -> None:
    found = fixed(forward, form, dynamic={"x": [0]})
    assert (found.copies, found.done.clones) == ((), ())


def test_no_copy_is_left_of_views_that_are_no_slices() -> None:
    assert fixed(heads, "v2").copies == ()


@both
def test_what_a_model_copies_itself_stays(form: Form) -> None:
    """The column that is set is a copy in the model too."""
    found = fixed(aten_views, form)
    assert [node.target for node in found.module.graph.nodes if node.name in found.copies] == [aten.copy_.default]
    assert found.done.clones == ()


@pytest.mark.cases(1)
@both
def test_ops_are_called_as_the_model_calls_them(form: Form) -> None:
    """On the memory of the model: the cache itself and the views that were there, with no more than it gave."""
    found = fixed(joined_projection, form)
    (mix,) = [node for node in found.module.graph.nodes if node.target is MIX]
    assert [node.target for node in mix.args] == [aten.slice.Tensor] * 2
    found = fixed(several_results, form)
    (two,) = [node for node in found.module.graph.nodes if node.target is TWO]
    assert (len(two.args), two.kwargs) == (1, {"by": 3.0})
    found = fixed(only_written, form)
    (store,) = [node for node in found.module.graph.nodes if node.target is STORE]
    assert [node.op for node in store.args[:3]] == ["placeholder"] * 3


# --- a copy is left where it is needed, and says why


def later_reader(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    h = x + 1
    old = h.clone()
    OWN(h)
    return old * h


def old_returned(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    h = x + 1
    old = h.clone()
    INC(h, x)
    return old[1:], h + 1


def two_versions(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    h = x + 1
    other = h.clone()
    OWN(h)
    INC(other, x)
    return h * other


def no_clones(module: fx.GraphModule) -> None:
    """Take the model's own clones away, as a pass on functional graphs may."""
    for node in list(module.graph.nodes):
        if node.target is aten.clone.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


@pytest.mark.cases(2)
@both
@pytest.mark.parametrize(
    ("forward", "copies", "reason"),
    [
        (later_reader, 1, "needs the old value of add"),
        (old_returned, 1, "output needs the old value of add"),
        (two_versions, 1, "needs the old value of add"),
    ],
)
def test_one_copy_is_left_where_two_versions_are_needed(
    forward: Callable[..., Any], copies: int, reason: str, form: Form
) -> None:
    kept = fixed(forward, form)  # with the model's own clone
    assert len(kept.copies) == copies and kept.done.clones == ()
    found = fixed(forward, form, change=no_clones)
    assert len(found.copies) == copies, found.copies
    assert reason in found.reasons


@both
def test_a_reader_that_was_moved_behind_an_update_is_moved_back(form: Form) -> None:
    """Inductor orders nodes for locality: `a = h + 1` then comes after the second write of `h`."""

    def late(module: fx.GraphModule) -> None:
        (read,) = [n for n in module.graph.nodes if n.target is aten.add.Tensor and n.args[1] == 1 and "add" in n.name][
            1:
        ]
        user = next(iter(read.users))
        user.prepend(read)

    found = fixed(read_before, form, change=late)
    assert (found.copies, found.done.num_moved) == ((), 1)


@both
def test_what_reads_the_new_value_too_is_not_moved(form: Form) -> None:
    def crossed(module: fx.GraphModule) -> None:
        """Let a product read the value before and after the second write."""
        nodes = list(module.graph.nodes)
        old, new = [n for n in nodes if str(getattr(n.target, "__name__", "")) == "getitem" and n.users][:2]
        product = next(n for n in nodes if n.target is aten.mul.Tensor and new in n.args)
        product.args = (old, new)

    graph = trace(State(lambda s, x, rows, slots: read_twice(x)), IN)
    functional = to_functional(graph.module, form)
    crossed(functional)
    functional.recompile()
    (wanted,) = functional(*graph.values(IN))
    done = reinplace(functional)
    (got,) = functional(*graph.values(IN))
    assert torch.equal(got, wanted)
    assert len(done.clones) == 1 and "mul needs the old value of getitem_1" in done.clones[0].reason


def read_twice(x: Tensor) -> Tensor:
    h = x + 1
    OWN(h)
    OWN(h)
    return h * h


@both
def test_an_input_that_nobody_is_to_see_written_keeps_its_value(form: Form) -> None:
    def unwritten(module: fx.GraphModule) -> None:
        for node in [n for n in module.graph.nodes if n.target is aten.copy_.default]:
            module.graph.erase_node(node)

    graph = trace(State(buffer), IN)
    functional = to_functional(graph.module, form)
    unwritten(functional)
    values = graph.values(IN)
    before = [value.clone() for value in values]
    functional.recompile()
    (wanted,) = functional(*values)
    done = reinplace(functional)
    (got,) = functional(*values)
    assert torch.equal(got, wanted)
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
    # One copy is enough: the second update writes the first one's.
    (miss,) = done.clones
    assert miss.reason.endswith("_cache_ is given to the graph, which leaves its value as it is")


@both
def test_the_new_value_returned_apart_from_the_input_is_a_copy(form: Form) -> None:
    """As a graph gives it in which a pass left out the clone of what is returned."""

    def forward(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        INC(s.cache, x)
        return s.cache.clone()

    found = fixed(forward, form, change=no_clones)
    assert len(found.copies) >= 1 and "is returned apart from" in found.reasons
    output, placeholders = found.module.graph.output_node(), found.module.graph.find_nodes(op="placeholder")
    assert not any(node in placeholders for node in output.all_input_nodes)


@both
def test_an_op_that_reads_the_old_value_besides(form: Form) -> None:
    def forward(s: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        h = x + 1
        INC(h, h)
        return h

    found = fixed(forward, form)
    assert len(found.copies) == 1 and "it reads the old value of" in found.reasons


def test_two_arguments_of_one_memory() -> None:
    """v1 gives each argument a copy of its own; in place, one would see what the op writes into the other."""

    def overlapping(module: fx.GraphModule) -> None:
        (node,) = [n for n in module.graph.nodes if n.target is torch.ops.higher_order.auto_functionalized]
        node.kwargs = {**node.kwargs, "k": node.kwargs["q"]}

    graph = trace(lambda x: two_arguments(x), {"x": X})
    functional = to_functional(graph.module, "v1")
    overlapping(functional)
    functional.recompile()
    wanted = functional(*graph.values({"x": X}))
    done = reinplace(functional)
    assert all(map(torch.equal, functional(*graph.values({"x": X})), wanted))
    assert [miss.reason for miss in done.clones] == ["another argument writes into the memory of add"]


def two_arguments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = x + 1, x + 2
    return MIX(q, k), q, k
