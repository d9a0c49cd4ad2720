"""core/compilation/weights.py: new values reach the graphs of a program, and what can't be right is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Guards
from core.common.passes.results import PassResult
from core.compilation.program import Program
from core.device import Device
from core.errors import CaptureError, UsageError
from tests.recording import acme
from tests.support import compile_with, cpu, refused

INPUTS = {"x": core.InputSpec(("rows", 16), torch.float32)}
BUCKETS = {"forward": [{"rows": 4}]}
X = torch.linspace(-1, 1, 64).reshape(4, 16)


class Projections(nn.Module):
    """Three linears of one input, which `merge_linears` joins, and an embedding tied to the last layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.last, self.tied = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("shift", torch.rand(16))
        self.register_buffer("table", torch.ones(16), persistent=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.query(x) * torch.sigmoid(self.key(x)) + self.value(x) + self.shift * self.table
        return self.tied(torch.relu(self.last(found)))


Pair = tuple[Projections, Program]


@pytest.fixture(scope="module", params=["cpu", "acme"])
def made(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A model and its program, whose linears are merged; on acme its graphs are recorded."""
    device = cpu() if request.param == "cpu" else acme()
    with compiled(Projections(), device) as program:
        yield program.model, program.program


@pytest.fixture
def pair(made: Pair) -> Pair:
    """The same, with the weights that the model began with."""
    _, program = made
    program.load_weights(Projections().state_dict())
    return made


class compiled:
    """Compile a model with merged linears; a context manager that closes the program."""

    def __init__(self, model: Any, device: Device, **options: Any) -> None:
        self.model = model
        options = {"lowering": "inline", "enable_passes": ("merge_linears",), **options}
        self.program = compile_with(model, device, inputs=INPUTS, buckets=BUCKETS, **options)

    def __enter__(self) -> compiled:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.close()


def test_graphs_compute_with_new_weights_at_the_old_addresses(pair: Pair) -> None:
    model, program = pair
    merged = [each for trace in program.report().traces for each in trace.passes if each.name == "merge_linears"]
    assert sum(each.matched for each in merged) == 1
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    other = Projections(seed=1)
    before = program(x=X).clone()
    program.load_weights(other.state_dict())
    torch.testing.assert_close(program(x=X), other(X))
    assert not torch.equal(program(x=X), before)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses


def test_weights_may_come_one_by_one_and_in_part(pair: Pair) -> None:
    _, program = pair
    other = Projections(seed=1)
    program.load_weights(iter(other.state_dict().items()))
    torch.testing.assert_close(program(x=X), other(X))
    third = Projections(seed=2)
    other.query.load_state_dict(third.query.state_dict())
    program.load_weights(((f"query.{name}", tensor) for name, tensor in third.query.state_dict().items()), partial=True)
    torch.testing.assert_close(program(x=X), other(X))


def test_parameters_alone_suffice_and_one_name_of_a_tied_one(pair: Pair) -> None:
    model, program = pair
    other = Projections(seed=1)
    other.shift.copy_(model.shift)
    program.load_weights({name: tensor for name, tensor in other.named_parameters() if name != "tied.weight"})
    torch.testing.assert_close(program(x=X), other(X))


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        (lambda s: s.update({"querry.weight": X}), ("no 'querry.weight'", "'query.weight'")),
        (lambda s: s.pop("query.bias"), ("missing: 'query.bias'",)),
        (lambda s: (s.pop("last.weight"), s.pop("tied.weight")), ("missing: 'last.weight', 'tied.weight'",)),
        (lambda s: s.update({"key.bias": X}), ("'key.bias' has shape (4, 16)", "(16,)")),
        (lambda s: s.update({"key.bias": s["key.bias"].double()}), ("'key.bias' is of torch.float64", "float32")),
        (lambda s: s.update({"tied.weight": s["last.weight"] + 1}), ("'tied.weight' is tied",)),
        (lambda s: s.update({"table": torch.zeros(16)}), ("no 'table'",)),
        (lambda s: s.update({"last": 3}), ("'last' is a int",)),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_wrong_is_refused(pair: Pair, change: Change, phrases: tuple[str, ...], lazy: bool) -> None:
    _, program = pair
    before, right = program(x=X).clone(), Projections(seed=1).state_dict()
    state = dict(right)
    change(state)
    with refused(UsageError, "load weights into a program", *phrases):
        program.load_weights(iter(state.items()) if lazy else state)
    if lazy:
        for call in (lambda: program(x=X), lambda: program.replay(program.keys[0])):
            with refused(UsageError, "loading stopped", "load_weights with all"):
                call()
        with pytest.raises(UsageError, match="missing"):
            program.load_weights({})
        with pytest.raises(UsageError, match="loading stopped"):
            program(x=X)
        program.load_weights(right)
        torch.testing.assert_close(program(x=X), Projections(seed=1)(X))
    else:
        torch.testing.assert_close(program(x=X), before, rtol=0, atol=0)


def test_a_source_that_fails_before_it_gives_anything_changes_nothing(pair: Pair) -> None:
    _, program = pair
    before = program(x=X).clone()
    with pytest.raises(ZeroDivisionError):
        program.load_weights(("query.bias", X / (1 // zero)) for zero in (0,))
    torch.testing.assert_close(program(x=X), before, rtol=0, atol=0)


def test_a_moved_or_replaced_weight_is_refused() -> None:
    made = compiled(Projections(), cpu())
    model, program = made.model, made.program
    model.query.weight.data = model.query.weight.clone()
    with refused(UsageError, "'query.weight' was moved or replaced after the compile"):
        program.load_weights(Projections(seed=1).state_dict())
    model.query.weight = nn.Parameter(torch.zeros(16, 16))
    with refused(UsageError, "'query.weight' was moved or replaced after the compile"):
        program.load_weights(Projections(seed=1).state_dict())


def test_a_closed_program_takes_no_weights() -> None:
    with compiled(Projections(), cpu()) as made:
        pass
    with refused(CaptureError, "loading weights", "closed"):
        made.program.load_weights(Projections().state_dict())


def test_an_eager_program_reads_the_weights_that_it_is_given() -> None:
    with compiled(Projections(), cpu(), mode="off", lowering=None) as made:
        made.model.query.weight.data = made.model.query.weight.clone()  # no graph reads the old place
        made.program.load_weights(Projections(seed=1).state_dict())
        torch.testing.assert_close(made.program(x=X), Projections(seed=1)(X))


def reading(context: PassContext) -> PassResult:
    """Read the content of one weight, as a pass that tells equal scales does."""
    assert context.constants is not None
    node = next(n for n in context.graph.find_nodes(op="placeholder") if "shift" in n.name)
    assert context.constants.value(node) is not None
    return PassResult(matched=0)


def binding(sources: bool) -> Callable[[PassContext], PassResult]:
    """Return a pass that binds a tensor made of a weight, and says so or not."""

    def run(context: PassContext) -> PassResult:
        assert context.constants is not None
        node = next(n for n in context.graph.find_nodes(op="placeholder") if "shift" in n.name)
        shift = context.constants.value(node)
        assert shift is not None
        made = context.constants.add(context.graph, "doubled", shift * 2, node, sources=(shift,) if sources else None)
        user = next(iter(node.users))
        with context.graph.inserting_before(user):
            half = context.graph.call_function(torch.mul, (made, 0.5))
        half.meta |= {key: value for key, value in node.meta.items() if key in ("example_value", "val")}
        user.replace_input_with(node, half)
        return PassResult(matched=1, sites=("shift",))

    return run


def with_pass(run: Callable[[PassContext], PassResult]) -> Device:
    return cpu(passes=(Pass(name="own", does="Read a weight.", run=run, guards=Guards(constants=True)),))


@pytest.mark.cases(1)
@pytest.mark.parametrize("run", [reading, binding(sources=True)])
def test_a_weight_of_which_a_pass_made_something_keeps_its_values(run: Callable[[PassContext], PassResult]) -> None:
    with compiled(Projections(), with_pass(run)) as made:
        assert all(not each.error for trace in made.program.report().traces for each in trace.passes)
        other = Projections(seed=1)
        with refused(UsageError, "'shift' can't change, as passes made the graphs by its values"):
            made.program.load_weights(other.state_dict())
        other.shift.copy_(made.model.shift)
        made.program.load_weights(other.state_dict())
        torch.testing.assert_close(made.program(x=X), other(X))


def test_many_weights_that_passes_have_read_have_no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.compilation.weights._MOST_DIGESTED", 16)
    with compiled(Projections(), with_pass(reading)) as made:
        state = made.model.state_dict()
        with refused(UsageError, "'shift' can't change"):
            made.program.load_weights(state)
        made.program.load_weights({name: tensor for name, tensor in state.items() if name != "shift"})


def test_a_tensor_that_a_pass_made_of_nobody_knows_what_is_named() -> None:
    with (
        compiled(Projections(), with_pass(binding(sources=False))) as made,
        refused(UsageError, "the graphs hold doubled", "disable_passes"),
    ):
        made.program.load_weights(Projections(seed=1).state_dict())
