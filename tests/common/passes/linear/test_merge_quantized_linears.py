"""core/common/passes/linear/merge.py on quantised layers: codes and their scales are joined, and stay views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.common.numerics import judge
from core.common.passes.cleanup.cse import ELIMINATE_COMMON_SUBEXPRESSIONS
from core.common.passes.linear.merge import MERGE_LINEARS
from core.common.passes.metadata import value_of
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.quantization.quantize import quantize
from core.verify.execution import run_graph
from tests.common.passes.linear.merging import Decoder, constants_of, tokens

DTYPES = [torch.float32, torch.bfloat16]
FP8, INT8 = torch.float8_e4m3fn, torch.int8
ops: Any = torch.ops.core


class Merged:
    """A function of x, traced and merged; numbers are judged against the graph before."""

    def __init__(self, function: Callable[..., Any], x: Tensor) -> None:
        self.graph, self.x = trace(lambda x: function(x), {"x": x}), x
        self.constants = constants_of(self.graph)
        before, exact = self.run(), self.run(fp64=True)
        self.bytes_before = memory(self.constants.tensors())
        passes = [ELIMINATE_COMMON_SUBEXPRESSIONS, MERGE_LINEARS]
        self.report: PassReport
        _, self.report = PassManager(passes, strict=True).run(self.graph.module, constants=self.constants)
        nodes = {node.name: node for node in self.graph.module.graph.nodes}
        for name, tensor in self.constants.added:  # a bias is not of the dtype of the codes
            assert value_of(nodes[name]).dtype == tensor.dtype, name
        for result, old, truth in zip(self.run(), before, exact, strict=True):
            verdict = judge(result, old, truth)
            assert verdict.passed, verdict.reason

    def run(self, *, fp64: bool = False) -> list[Tensor]:
        added = [tensor for _, tensor in self.constants.added]
        return list(run_graph(self.graph.module, [*self.graph.values({"x": self.x}), *added], fp64=fp64).outputs)

    def calls(self) -> list[Any]:
        quantised = (ops.quantized_linear, ops.weight_only_linear)
        targets = (*quantised, *(each.default for each in quantised))
        return [node for node in self.graph.module.graph.nodes if node.target in targets]


def memory(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("scheme", "kinds"),
    [
        *(("fp8", "---"), ("int8", "b-b"), ("int8-asymmetric", "---")),
        *(("w4a16-g32", "---"), ("w4a16-asymmetric-g32", "b-b"), ("w8a16", "---")),
    ],
)
def test_projections_of_the_same_codes_become_one(scheme: str, kinds: str, dtype: torch.dtype) -> None:
    model: Any = quantize(Decoder(2, kinds=kinds, dtype=dtype), scheme)
    held = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    merged = Merged(model, tokens(dtype))
    assert (merged.report.matched, merged.report.near_misses) == (2 * 2, ())
    assert len(merged.calls()) == 2 * 4  # qkv, o, gate-up, down
    for name, (tensor, value) in held.items():  # the parameters are the same objects, with the same values
        assert model.get_parameter(name) is tensor and torch.equal(tensor.double(), value.double())
    for layer in model.layers:
        projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        for part in ("weight", "weight_scale", *(("weight_zero_point",) if scheme.startswith("w4a16-a") else ())):
            assert len({getattr(p, part).untyped_storage().data_ptr() for p in projections}) == 1
    zeros = 2 * 32 * dtype.itemsize if kinds == "b-b" else 0  # of the layer that has no bias
    assert memory(merged.constants.tensors()) == merged.bytes_before + zeros


@pytest.mark.slow
def test_weights_loaded_in_place_reach_the_merged_graph() -> None:
    model, other = (quantize(Decoder(1), "fp8") for _ in range(2))
    for name, tensor in other.state_dict().items():
        if name.endswith("weight_scale"):
            tensor.mul_(1.5)
        elif name.endswith("q_proj.weight"):
            tensor.copy_(tensor.flip(0))
    merged, wanted = Merged(model, tokens()), Merged(other, tokens()).run()[0]
    assert not torch.allclose(merged.run()[0], wanted, rtol=1e-2, atol=1e-2)
    model.load_state_dict(other.state_dict())
    assert torch.equal(merged.run()[0], wanted)


class Pair(nn.Module):
    """Two quantised projections of one input, with weight scales of any shape, joined by a function of both."""

    def __init__(self, *shapes: tuple[int, ...], sizes: tuple[int, int] = (32, 64), **further: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.further = [dict(zip(further, values, strict=True)) for values in zip(*further.values(), strict=True)]
        for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            codes = (torch.randn(size, 64, generator=generator) * 40).clamp(-127, 127).to(INT8)
            self.register_buffer(f"w{index}", codes)
            self.register_buffer(f"s{index}", torch.rand(shape, generator=generator) * 0.01 + 0.001)

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = ops.quantize(x, None, dtype=INT8)
        further = self.further or [{}, {}]
        first, second = (
            ops.quantized_linear(codes, scale, w, s, None, out_dtype=x.dtype, **options)
            for w, s, options in zip((self.w0, self.w1), (self.s0, self.s1), further, strict=True)
        )
        out: Tensor = first.sin().sum(-1, keepdim=True) + second.cos()
        return out


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {
    "by channel": ((32, 1), (64, 1), (96, 1), True),
    "by group of a channel": ((32, 4), (64, 4), (96, 4), True),
    "by block": ((2, 4), (4, 4), (6, 4), True),
    "for the whole": ((), (), (96, 1), False),
    "for the whole, two dimensions": ((1, 1), (1, 1), (96, 1), False),
    "for the whole, and by channel": ((), (64, 1), (96, 1), False),
    "blocks of two sizes": ((2, 4), (8, 4), (96, 4), False),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", SHAPES)
def test_scales_of_weights_are_joined_as_they_are_or_spread(name: str) -> None:
    first, second, whole, shared = SHAPES[name]
    pair = Pair(first, second)
    merged = Merged(pair, tokens())
    assert merged.report.matched == 1
    (call,) = merged.calls()
    scale = merged.constants.value(call.args[3])
    assert scale is not None and scale.shape == whole
    assert (scale.untyped_storage().data_ptr() == pair.s0.untyped_storage().data_ptr()) is shared


def test_scales_of_another_number_of_groups_are_a_near_miss() -> None:
    merged = Merged(Pair((32, 4), (64, 1)), tokens())
    assert merged.report.matched == 0
    assert "differs in: scales of the weight" in merged.report.near_misses[0].reason


def test_zero_points_of_weights_are_a_near_miss() -> None:
    zeros = [torch.zeros(32, 1, dtype=INT8), torch.ones(64, 1, dtype=INT8)]
    merged = Merged(Pair((32, 1), (64, 1), w_zero_point=zeros), tokens())  # type: ignore[arg-type]  # one for each
    assert merged.report.matched == 0
    assert merged.report.near_misses[0].reason == "it has w_zero_point, which are not joined"


def test_layers_that_read_other_codes_are_left_apart() -> None:
    model: Any = quantize(Decoder(1), "fp8")

    class Apart(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = model.layers[0].mlp.gate_proj(x).sin() * model.layers[0].mlp.up_proj(x * 2)
            return out

    merged = Merged(Apart(), tokens())
    assert (merged.report.matched, merged.report.near_misses) == (0, ())


@pytest.mark.parametrize(
    "schemes",
    [("fp8", "int8"), ("w4a16-g32", "w8a16"), ("w4a16-g32", "w4a16-asymmetric-g32"), ("w4a16-g32", "w4a16-g64")],
)
def test_formats_are_not_mixed(schemes: tuple[str, str]) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (quantize(nn.Sequential(nn.Linear(64, 32, bias=False)), scheme) for scheme in schemes)
            self.first, self.second = layers

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.first(x).sin() * self.second(x)
            return out

    assert Merged(Mixed(), tokens()).report.matched == 0


class Shared(nn.Module):
    """Two layers of codes with one scale, or one tensor of zero points: joined, it would lie in two places."""

    def __init__(self, part: str) -> None:
        super().__init__()
        layers = quantize(nn.Sequential(*(nn.Linear(64, 32, bias=False) for _ in range(2))), "w4a16-asymmetric-g32")
        self.one, self.two = layers
        setattr(self.two, part, getattr(self.one, part))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x).sin() * self.two(x)
        return out


@pytest.mark.parametrize("part", ["weight_scale", "weight_zero_point"])
def test_a_tensor_that_two_layers_share_is_laid_down_once(part: str) -> None:
    merged = Merged(Shared(part), tokens())
    assert merged.report.matched == 0 and "is used twice on one input" in merged.report.near_misses[0].reason


def test_joined_scales_are_those_of_layers_of_these_sizes() -> None:
    """Two groups share the scales of their weights, for layers of other sizes."""

    class Groups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Pair((), (), sizes=(32, 64)), Pair((), (), sizes=(64, 32))
            self.second.s0, self.second.s1 = self.first.s0, self.first.s1

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x * 2)

    assert Merged(Groups(), tokens()).report.matched == 2
