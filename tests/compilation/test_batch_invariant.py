"""`deterministic="batch"`: rows keep every bit in any batch, and what can't promise that is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import core
import core.common.ops.canonical  # declares the ops
from core.common.lowering import INLINE, OwnOps
from core.common.ops.declaration import declared_ops
from core.common.passes import Pass, PassContext, PassResult, PassTraits
from core.compilation.options import CompileOptions
from core.compilation.rewrite.batch_invariant import choose_invariant, in_vectors
from core.compilation.rewrite.invariant_ops import REDUCTIONS, why_not
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewriting import Rewriter
from core.errors import LoweringError, UsageError
from core.host.selection import select_device
from tests.recording import acme
from tests.support import cpu, refused

BATCH = CompileOptions(deterministic="batch")


class Layers(nn.Module):
    """What a model is made of, of sizes that fill no vector."""

    def __init__(self, size: int = 45, hidden: int = 71) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, x.transpose(-1, -2)) @ x


def program_of(
    model: nn.Module, options: CompileOptions = BATCH, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> core.Program:
    example = torch.zeros(4, 45, dtype=next(iter(model.parameters()), torch.zeros(0, dtype=dtype)).dtype)
    dims = {"input" if isinstance(model, nn.Sequential) else "x": {0: "batch"}}
    return core.compile(
        model.eval(), device, example_inputs=(example,), dynamic=dims, buckets=[1, 4, 16, 64], options=options
    )


@pytest.mark.parametrize("name", ["silu", "gelu", "tanh", "sigmoid", "exp", "softplus", "sin", "rsqrt", "erf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_function_gives_a_number_the_same_bits_wherever_it_stands(name: str, dtype: torch.dtype) -> None:
    x = torch.rand(40_003, generator=torch.Generator().manual_seed(0)).mul_(4).add_(0.01).to(dtype)
    whole = in_vectors(name, x)
    for first, count in ((0, 1), (0, 63), (5, 64), (17, 1000), (20_001, 20_002), (40_000, 3)):
        assert torch.equal(in_vectors(name, x[first : first + count]), whole[first : first + count])
    plain = getattr(nn.functional, name, None) or getattr(torch, name)
    torch.testing.assert_close(whole, plain(x))
    assert in_vectors(name, x[:6].view(2, 3).t()).shape == (3, 2)
    assert in_vectors(name, x[:0]).shape == (0,)


REDUCED: dict[str, Callable[[Tensor], Any]] = {
    "_softmax": lambda x: torch._softmax(x, -1, False),
    "_log_softmax": lambda x: torch._log_softmax(x, -1, False),
    "norm": lambda x: x.norm(2, -1),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, -1)),
} | {
    name: lambda x, name=name: getattr(x, name)(-1)
    for name in REDUCTIONS - {"_softmax", "_log_softmax", "norm", "var_mean"}
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(REDUCED))
def test_a_reduction_gives_a_row_the_same_bits_beside_any_others(name: str, dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for size in (45, 64, 4096, 32_000):
            x = torch.rand(40, size, generator=torch.Generator().manual_seed(0)).to(dtype)
            whole = REDUCED[name](x)
            for first, count in ((0, 1), (7, 1), (3, 2), (0, 5), (20, 17)):
                found = REDUCED[name](x[first : first + count].clone())
                rows = whole[:, first : first + count] if name == "var_mean" else whole[first : first + count]
                assert torch.equal(found, rows), (size, first, count)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_keep_every_bit_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    program = program_of(Layers().to(dtype))
    x = torch.randn(64, 45).to(dtype)
    whole = program(x).clone()
    for first, count in ((0, 1), (63, 1), (3, 4), (10, 11), (1, 63)):
        assert torch.equal(program(x[first : first + count]), whole[first : first + count])
    report = program.report()
    assert report.lowering == "inline"
    chosen = {choice.implementation for trace in report.traces for choice in trace.ops if choice.op == "core::linear"}
    assert chosen == {"cpu_linear_alike"}


@pytest.mark.slow
def test_unasked_no_call_gets_what_is_there_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    report = program_of(Layers(), CompileOptions(lowering="inline")).report()
    chosen = [choice for trace in report.traces for choice in trace.ops]
    assert chosen
    assert not [each for each in chosen if "cpu_linear_alike" in (each.implementation, *each.others)]


@pytest.mark.slow
def test_what_is_not_known_to_be_so_is_refused_by_name() -> None:
    with refused(LoweringError, "matmul", "a product whose order of sums depends on its sizes"):
        program_of(Product())
    with refused(LoweringError, "fft", "it is not known"):
        program_of(Spectrum())
    bare = cpu(ops=tuple(each for each in select_device("cpu").ops if not each.batch_invariant))
    with refused(LoweringError, "linear"):
        program_of(Layers(), device=bare)


def test_what_asks_the_host_alone_is_no_sum() -> None:
    """transformers asks for a GPU's compute capability within a mixture's forward, and Dynamo keeps the call."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    asked = graph.call_function(torch.cuda.get_device_capability, (torch.device("cuda"),))
    drawn = graph.call_function(torch.fft.fft, (x,))
    graph.output(x)
    x.meta["example_value"], drawn.meta["example_value"] = torch.empty(2, 3), torch.empty(2, 3)
    assert why_not(asked) == ""
    assert "not known" in why_not(drawn)


ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + (x.flip(-1) + 2),
    "rests": lambda x: x % (x.flip(-1).abs() + 0.7) + x // (x.abs() + 0.4),
    "a number": lambda x: (x - 0.3) * 0.7 / 3.3 + 0.3 / (x.abs() + 1),
    "a row": lambda x: x * torch.linspace(0.1, 0.9, x.shape[-1]).to(x.dtype),
    "a column": lambda x: x / (x[:, :1].abs() + 3),
    "two dtypes": lambda x: x * (x.flip(-1) + 2).float(),
    "strided": lambda x: x[:, ::2] / (x.flip(-1)[:, ::2].abs() + 2),
    "expanded": lambda x: x[:, None].expand(-1, 3, -1) - (x * 3)[:, None],
    "of one": lambda x: (x.square().sqrt() + x.abs().reciprocal().nan_to_num()).clamp(-1, 5).round(),
    "dtypes": lambda x: x.to(torch.float16).to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(ARITHMETIC))
def test_arithmetic_gives_a_number_the_same_bits_wherever_it_stands(name: str, dtype: torch.dtype) -> None:
    """torch's own, which batch-invariant programs leave as it is."""
    for size in (45, 64, 1000):
        x = torch.randn(200, size, generator=torch.Generator().manual_seed(0)).mul_(2).to(dtype)
        whole = ARITHMETIC[name](x)
        for first, count in ((0, 1), (3, 2), (50, 3), (0, 8), (3, 17), (50, 64)):
            assert torch.equal(ARITHMETIC[name](x[first : first + count]), whole[first : first + count])


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).real


class Calls(nn.Module):
    """A function of rows, as a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "phrases"),
    [
        (lambda x: x.view(-1, 5, 9).sum(1), ("sum: node", "over other dimensions than the last")),
        (lambda x: x - x.mean(), ("mean: node", "over other dimensions than the last")),
        (lambda x: x.softmax(0), ("softmax: node", "over other dimensions than the last")),
        (lambda x: x.repeat(1, 1000).sum(-1), ("sum: node", "over 45000 numbers, which threads share")),
        (
            lambda x: torch.zeros(9, 45).index_put((x[:, 0].long(),), x, accumulate=True) + x[:1],
            ("index_put: node", "adds up what goes to one place"),
        ),
    ],
    ids=["middle", "all", "batch", "long", "accumulated"],
)
def test_sums_whose_order_sizes_decide_are_refused(
    function: Callable[[Tensor], Tensor], phrases: tuple[str, ...]
) -> None:
    with refused(LoweringError, *phrases):
        program_of(Calls(function))


def test_a_sum_of_whole_numbers_may_be_over_anything() -> None:
    program = program_of(Calls(lambda x: x * (x.view(-1, 5, 9) > 0).sum(1).sum(1, keepdim=True)))
    assert torch.equal(program(torch.ones(3, 45)), torch.full((3, 45), 45.0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.functional.silu(input=x),
        lambda x: torch.add(x, x.flip(-1), alpha=0.3),
        lambda x: torch.pow(x.abs() + 1, torch.tensor(1.7)),
    ],
    ids=["named argument", "alpha", "of a number"],
)
def test_functions_keep_bits_however_they_are_called(function: Callable[[Tensor], Tensor]) -> None:
    program = program_of(Calls(function), dtype=torch.bfloat16)
    x = torch.randn(64, 45, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = program(x).clone()
    for first, count in ((0, 1), (3, 4), (10, 11), (1, 63)):
        assert torch.equal(program(x[first : first + count]), whole[first : first + count])


def test_a_function_that_writes_in_place_is_refused_where_the_graph_keeps_it() -> None:
    graph = fx.Graph()
    graph.output(graph.call_method("exp_", (graph.placeholder("x"),)))
    with refused(LoweringError, "exp: node 'exp_' calls it, and writes its result in place"):
        choose_invariant(fx.GraphModule({}, graph), ())


CPU_OPS = tuple(select_device("cpu").ops)
KEPT = {each.op for each in CPU_OPS if each.batch_invariant} | {"core::argmax", "core::sample"}


@pytest.mark.parametrize("name", sorted(declared_ops()))
def test_a_canonical_op_runs_by_a_declared_kernel_or_is_refused_by_name(name: str) -> None:
    op = declared_ops()[name]
    call = next(iter(op.samples(torch.float32, torch.device("cpu")))).kwargs
    graph, args = fx.Graph(), dict[str, Any]()
    for key, value in call.items():
        args[key] = graph.placeholder(key) if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            args[key].meta["example_value"] = value
    graph.output(graph.call_function(op.overload, (), args))
    module = fx.GraphModule({}, graph)
    if name in KEPT:
        assert choose_invariant(module, CPU_OPS)
        return
    with refused(LoweringError, f"{name}: no batch-invariant implementation takes", "none is declared"):
        choose_invariant(module, CPU_OPS)


@pytest.mark.parametrize(
    ("options", "phrases"),
    [
        ({"lowering": "inductor"}, ("lowering 'inductor' is not declared batch-invariant", "inline")),
        ({"mode": "off"}, ("mode 'off' runs the model's own code",)),
        ({"providers": {"core::linear": "torch_linear"}}, ("'torch_linear' is not declared", "cpu_linear_alike")),
    ],
    ids=["lowering", "mode", "provider"],
)
def test_options_that_contradict_it_are_refused(options: dict[str, Any], phrases: tuple[str, ...]) -> None:
    with refused(UsageError, *phrases):
        program_of(Layers(), replace(BATCH, **options))


def test_a_device_that_declares_nothing_is_refused() -> None:
    with refused(UsageError, "device 'acme' declares no lowering as batch-invariant"):
        program_of(Layers(), device=acme(lowerings=INLINE))


def test_its_value_is_checked() -> None:
    with refused(UsageError, "deterministic='all'", "choose one of: batch"):
        CompileOptions(deterministic="all")  # type: ignore[arg-type]


def test_a_provider_that_declares_it_may_be_named() -> None:
    program = program_of(Layers(), replace(BATCH, providers={"core::linear": "cpu_linear_alike"}))
    assert program(torch.ones(3, 45)).shape == (3, 45)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x.softmax(-1) - x.mean(-1, keepdim=True))


def test_a_device_says_which_ops_of_torch_do_not_keep_a_row() -> None:
    def on(**own_ops: Any) -> Any:
        lowerings = replace(INLINE, batch_invariant=frozenset({"inline"}), own_ops=OwnOps(**own_ops))
        return replace(select_device("cpu"), lowerings=lowerings)

    assert program_of(Softmax(), device=on(by_batch=frozenset({"sum"})))(torch.ones(3, 45)).shape == (3, 45)
    with refused(LoweringError, "mean: node 'mean' calls it, and this device's kernels order"):
        program_of(Softmax(), device=on(by_batch=frozenset({"mean"})))


def test_functions_are_called_as_they_stand_where_the_device_keeps_their_bits() -> None:
    def graph() -> fx.GraphModule:
        made = fx.Graph()
        made.output(made.call_method("exp", (made.placeholder("x"),)))
        return fx.GraphModule({}, made)

    for alike, target in ((False, in_vectors), (True, "exp")):
        module = graph()
        choose_invariant(module, (), own_ops=OwnOps(functions_alike=alike))
        assert [node.target for node in module.graph.nodes][1] == target


def test_passes_of_own_kernels_are_left_out_unless_they_are_asked_for() -> None:
    def run(context: PassContext) -> PassResult:
        return PassResult(matched=0)

    bare = Pass(name="own", run=run, owner="here", traits=PassTraits(own_kernels=True))
    device = cpu(passes=(*select_device("cpu").passes, bare))
    assert "own" in {each.name for each in Rewriter(device).manager.passes}
    assert "own" not in {each.name for each in Rewriter(device, batch_invariant=True).manager.passes}
    asked = PassSwitches(enable=("own",))
    assert "own" in {each.name for each in Rewriter(device, asked, batch_invariant=True).manager.passes}
