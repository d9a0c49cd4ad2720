"""core/compilation/trace/flattening.py: weights of tensor subclasses are plain tensors in a graph, and themselves in
the model.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import core
from core import InputSpec
from core.common.numerics import judge
from core.compilation.trace.flattening import register_flattening
from core.compilation.trace.traced import ConstantSlot, TracedGraph
from core.compilation.trace.tracing import trace
from core.device import Device
from core.errors import TraceError, UsageError
from tests.marks import slow_except
from tests.recording import acme
from tests.support import cpu, refused

aten = torch.ops.aten


class Opaque(Tensor):
    """Int8 codes (N, K) with a scale per channel (N, 1), which computes as what they stand for.

    It handles ATen ops: views keep the codes, everything else dequantises. It does not say what it is made of.
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: type[Any], codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype = torch.float32) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, dtype)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return (self.codes.to(torch.float32) * self.scale).to(self.dtype)

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.t.default):
            return cls(func(args[0].codes), func(args[0].scale), args[0].dtype)
        if func is aten.copy_.default and isinstance(args[1], Opaque):
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        args, kwargs = pytree.tree_map_only(Opaque, lambda each: each.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Codes(Opaque):
    """The same, and says what it is made of, as torchao's classes do."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], dtype)


class Scaled(Codes):
    """The same with a product of its own, by `__torch_function__`, as torchao does it for linears."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], cls):
            x, weight = args[:2]
            result = F.linear(x, weight.codes.to(x.dtype)) * weight.scale.t().to(x.dtype)
            return result if len(args) < 3 or args[2] is None else result + args[2]
        return super().__torch_function__(func, types, args, kwargs or {})


class Loaded(nn.Parameter):
    """A parameter that only carries attributes, as engines have them."""

    def __new__(cls, data: Tensor, loader: Callable[..., None]) -> Loaded:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, loader: Callable[..., None]) -> None:
        self.loader = loader


class PerChannel(nn.Parameter):
    """Codes as the parameter itself, with the scale beside them, and a product of its own."""

    def __new__(cls, data: Tensor, scale: Tensor) -> PerChannel:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.scale = scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(args[0], args[1].to(args[0].dtype)) * args[1].scale
        return super().__torch_function__(func, types, args, kwargs or {})


def loader(_: Tensor) -> None:
    """Load nothing."""


class Layer(nn.Module):
    def __init__(self, weight: Tensor, bias: bool = True) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, weight.shape[0])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def weight(rows: int = 24, columns: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def per_channel() -> PerChannel:
    codes = Codes.of(weight())
    return PerChannel(codes.codes, codes.scale.t())


KINDS: dict[str, Callable[[], Tensor]] = {
    "codes": lambda: Codes.of(weight()),
    "own product": lambda: Scaled.of(weight()),
    "attributes": lambda: Loaded(weight(), loader),
    "scale beside it": per_channel,
}
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(9))


def constants(graph: TracedGraph) -> list[Any]:
    return [slot.value for slot in graph.slots if isinstance(slot, ConstantSlot)]


def run(graph: TracedGraph, x: Tensor) -> Tensor:
    (result,) = graph.module(*graph.values({"x": x}))
    return result  # type: ignore[no-any-return]


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return what a tensor carries, but for Dynamo's mark, which it puts on every parameter."""
    return {name: id(value) for name, value in vars(tensor).items() if not name.startswith("_dynamo")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_sees_plain_tensors_and_the_model_keeps_its_own(kind: str) -> None:
    given = KINDS[kind]()
    model = Layer(given, bias="beside" not in kind).eval()
    before = {name: (id(tensor), type(tensor)) for name, tensor in model.named_parameters()}
    names, attributes = list(model.state_dict()), own_attributes(model.weight)
    graph = trace(model, {"x": X}, dynamic={"x": [0]})
    assert {type(value) for value in constants(graph)} <= {Tensor, nn.Parameter}
    fakes = [node.meta["example_value"] for node in graph.module.graph.find_nodes(op="placeholder")]
    assert {type(fake) for fake in fakes} <= {FakeTensor, nn.Parameter, torch.SymInt}
    assert torch.equal(run(graph, X), model(X))
    assert torch.equal(run(graph, X[:3]), model(X[:3]))  # and not at one size only
    assert {name: (id(tensor), type(tensor)) for name, tensor in model.named_parameters()} == before
    assert (list(model.state_dict()), own_attributes(model.weight)) == (names, attributes)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_shared_and_updates_in_place_are_seen(kind: str) -> None:
    model = Layer(KINDS[kind](), bias=False).eval()
    inputs = {"x": InputSpec(("n", 16), torch.float32)}
    program = core.compile(model, "cpu", inputs=inputs, buckets=[8], lowering="inline", strict=True)
    first = program(x=X).clone()
    torch.testing.assert_close(first, model(X))
    held = model.weight.codes if isinstance(model.weight, Codes) else model.weight
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        held.neg_()
    torch.testing.assert_close(program(x=X), -first)
    torch.testing.assert_close(program(x=X), model(X))
    if isinstance(model.weight, Codes):
        new = type(model.weight).of(weight(seed=5))
        model.load_state_dict({"weight": new})
        torch.testing.assert_close(program(x=X), model(X))


def test_the_parts_lie_in_the_models_memory() -> None:
    model = Layer(Codes.of(weight())).eval()
    graph = trace(model, {"x": X})
    own: Any = model.weight
    places = {value.data_ptr() for value in constants(graph)}
    assert places == {own.codes.data_ptr(), own.scale.data_ptr(), model.bias.data_ptr()}


class Mixed(nn.Module):
    """Two layers of one weight, one of another class within it, a buffer, and a scale that is read by itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.norm.weight.data.copy_(torch.linspace(0.3, 1.7, 16))
        self.up = Layer(Codes.of(weight(16, 16), dtype), bias=False)
        self.again = Layer(self.up.weight, bias=False)
        self.nested = Layer(Nested(Codes.of(weight(16, 16, 3), dtype)), bias=False)
        self.register_buffer("table", Codes.of(weight(16, 16, 4), dtype))

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(F.silu(self.up(self.norm(x)))) + self.nested(x)
        own: Any = self.up.weight
        return h @ self.table * own.scale.t().to(x.dtype) + x


class Nested(Tensor):
    """A tensor of another subclass, multiplied by two."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type[Any], inner: Tensor) -> Any:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.t.default):
            return cls(func(args[0].inner))
        args, kwargs = pytree.tree_map_only(Nested, lambda each: each.inner * 2, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("device", "dtype"),
    slow_except(product((cpu, acme), (torch.float32, torch.bfloat16)), (acme, torch.bfloat16)),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_whole_model_is_compiled_and_captured(device: Callable[[], Device], dtype: torch.dtype) -> None:
    """By the processor, and by the example vendor's device, whose graphs hold addresses."""
    model = Mixed(dtype).eval()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs = {"x": InputSpec(("n", 16), dtype)}
    with core.compile(model, device(), inputs=inputs, buckets=[4, 64], lowering="inline", strict=True) as program:
        assert torch.equal(program(x=x), model(x))
        torch.testing.assert_close(program(x=x[:3]), model(x[:3]))  # filled up to 4 rows
        reference = Mixed(torch.float64).eval()(x.double())
        assert judge(program(x=x), model(x), reference).passed
        (made,) = program.report().traces
        matched = {report.name: report.matched for report in made.passes}
        assert matched["lift_layer_norm"] == 1  # what is around such weights is what it was
    values = constants(trace(model, {"x": x}))
    assert {type(value) for value in values} <= {Tensor, nn.Parameter}
    codes = [value for value in values if value.dtype == torch.int8]
    scales = [value for value in values if value.shape == (16, 1)]
    assert (len(codes), len(scales)) == (3, 3)  # each bound once, that which the model reads itself among them


def test_a_class_that_does_not_say_what_it_is_made_of() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Layer(Opaque.of(weight()), bias=False)).eval()
    with refused(
        TraceError, "tracing with 1.weight, a", "Opaque", "of which tensors it is made", "register_flattening"
    ):
        trace(model, {"input": X})


def test_a_class_that_nobody_uses_is_not_blamed() -> None:
    class Branching(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    with refused(TraceError, "tracing Branching as one graph"):
        trace(Branching(Opaque.of(weight()), bias=False).eval(), {"x": X})


def test_a_rule_for_a_class_of_somebody_elses() -> None:
    class Foreign(Opaque):
        """A class of its own, since a rule stays."""

    model = Layer(Foreign.of(weight())).eval()
    with refused(TraceError, "tracing with weight", "Foreign"):
        trace(model, {"x": X})
    register_flattening(
        Foreign,
        inner=("codes", "scale"),
        context=lambda tensor: tensor.dtype,
        rebuild=lambda inner, dtype: Foreign(inner["codes"], inner["scale"], dtype),
    )
    graph = trace(model, {"x": X})
    assert len(constants(graph)) == 3 and torch.equal(run(graph, X), model(X))
    with refused(UsageError, "a rule to flatten", "brings __tensor_flatten__"):
        register_flattening(Foreign, inner=("codes",), rebuild=lambda inner, context: inner["codes"])
    with refused(UsageError, "a rule to flatten", "as a plain tensor does"):
        register_flattening(Loaded, inner=("data",), rebuild=lambda inner, context: inner["data"])
    with refused(UsageError, "a rule to flatten", "names no inner tensor"):
        register_flattening(Opaque, inner=(), rebuild=lambda inner, context: torch.empty(0))


def test_a_model_that_returns_such_a_weight() -> None:
    class Returning(Layer):
        def forward(self, x: Tensor) -> Any:
            return x + 1, self.weight.t()

    with refused(TraceError, "returns one of its weights", "Codes", "return plain tensors"):
        trace(Returning(Codes.of(weight()), bias=False).eval(), {"x": X})
