"""core_cpu/aot/direct_calls.py and csrc/binding.h: compiled graphs call kernels as C functions, with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.lowering import LoweringRequest
from core.common.ops.attention.paged import ATTENTION
from core_cpu import extension
from core_cpu.aot import lowering
from core_cpu.aot.direct_calls import DirectCalls, load_kernels
from core_cpu.aot.lowering import inductor
from core_cpu.attention import attention
from core_cpu.collectives import all_reduce
from core_cpu.linear import linear
from core_cpu.lora import add_lora
from core_cpu.quantized import TOGETHER, quantized_linear
from core_cpu.weight_only import weight_only_linear
from tests.attention_cases import steps
from tests.kernel_cases import randn

pytestmark = pytest.mark.usefixtures("kernels")

X, WEIGHT, BIAS = randn(3, 64), randn(48, 64, seed=1), randn(48, seed=2)
CODES = torch.randint(-128, 128, (48, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(4))
SCALE = randn(48, 1, seed=5, scale=0.01, shift=0.1)


def linears(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight, bias) + 1, linear(x, weight, None)


def products(codes: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    one = quantized_linear(codes, scale, weight, scale, None, out_dtype=torch.bfloat16)
    bias, zero = scale.view(-1), codes[:, :1]
    return one, quantized_linear(codes, scale, weight, scale, bias, out_dtype=torch.float32, x_zero_point=zero)


def together(codes: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    first = (weight, scale, None)
    one, two = TOGETHER[2](codes, scale, *first, weight, scale, scale.view(-1), out_dtype=torch.bfloat16)
    return one, two.float() + 1


def weight_only(x: Tensor, codes: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (weight_only_linear(x, codes, scale, None, None, num_bits=8),)


def same(a: Tensor, b: Tensor) -> bool:
    """Compare bits where what nobody has written is NaN."""
    return torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


def graph_of(function: Callable[..., Any]) -> fx.GraphModule:
    return function if isinstance(function, fx.GraphModule) else fx.symbolic_trace(function)


def lowered(function: Callable[..., Any], values: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the compiled graph of a function, and the names of its files with what is noted of its kernels."""
    found: dict[str, Any] = {}

    def load(folder: Path, before: Any = lowering._load) -> Any:
        found["files"] = {path.name for path in folder.iterdir()}
        noted = folder / "kernels.json"
        found["kernels"] = json.loads(noted.read_text()) if noted.exists() else []
        return before(folder)

    monkeypatch.setattr(lowering, "_load", load)
    notes: list[str] = []
    run = inductor(LoweringRequest(graph=graph_of(function), example_inputs=tuple(values), note=notes.append))
    return run, found | {"notes": notes}


def test_kernels_of_tensors_and_numbers_are_declared_and_others_are_not() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(all_reduce(linear(x, weight), "group"), weight)

    declared = DirectCalls(fx.symbolic_trace(function)).declarations
    name = f"core_cpu_linear_{extension.ending('linear')}"
    arguments = "AtenTensorHandle, AtenTensorHandle, const AtenTensorHandle*, AtenTensorHandle*"
    assert declared == {linear: f'AOTITorchError (*aoti_torch_cpu_linear)({arguments}) __asm__("{name}")'}


def test_without_kernels_there_are_no_declarations_and_nothing_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extension, "load", lambda source: "no compiler")
    calls = DirectCalls(fx.symbolic_trace(linears))
    calls.write(tmp_path)
    assert calls.declarations == {} and list(tmp_path.iterdir()) == []
    load_kernels(tmp_path)


def test_a_graph_whose_kernels_are_missing_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    DirectCalls(fx.symbolic_trace(linears)).write(tmp_path)
    monkeypatch.setattr(extension, "load", lambda source: f"no {source}")
    with pytest.raises(OSError, match="no linear"):
        load_kernels(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "values", "source"),
    [
        (linears, [X, WEIGHT, BIAS], "linear"),
        (products, [CODES, CODES, SCALE], "quantized_linear"),
        (together, [CODES, CODES, SCALE], "quantized_linear"),
        (weight_only, [X, CODES, SCALE], "weight_only_linear"),
    ],
)
def test_a_graph_calls_kernels_without_the_dispatcher(
    function: Callable[..., Any], values: list[Tensor], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = lowered(function, values, monkeypatch)
    # What the dispatcher is told of custom ops' calls is not there.
    assert found == {"files": {"graph.so", "kernels.json"}, "kernels": [source], "notes": []}
    for got, expected in zip(run(*values), function(*values), strict=True):
        assert torch.equal(got, expected) and got.stride() == expected.stride()


@pytest.mark.slow
def test_a_kernel_is_called_directly_where_a_function_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [randn(3, 64), X, randn(6, 64, seed=1), randn(64, 6, seed=2), torch.tensor([1, 0, 3])]
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(name) for name in ("base", "x", "a", "b", "slots"))
    graph.output((graph.call_function(add_lora, inputs, {"rank": 2, "sizes": [64]}),))
    run, found = lowered(fx.GraphModule({}, graph), values, monkeypatch)
    assert found == {"files": {"graph.so", "kernels.json"}, "kernels": ["add_lora"], "notes": []}
    assert torch.equal(run(*values)[0], add_lora(*values, rank=2, sizes=[64]))


@pytest.mark.slow
def test_attention_writes_the_cache_and_says_which_slot_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    call = dict(ATTENTION.bind((), steps(lens=((1, 40), (3, 9)), page=16, heads=(4, 2))).args)
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in call.items() if name not in tensors}

    def fresh() -> list[Tensor]:
        return [value.clone() for value in tensors.values()]

    def function(*values: Tensor) -> Tensor:
        result: Tensor = attention(**dict(zip(tensors, values, strict=True)), **others)
        return result

    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in tensors]
    graph.output((graph.call_function(attention, (), dict(zip(tensors, inputs, strict=True)) | others),))
    run, found = lowered(fx.GraphModule({}, graph), fresh(), monkeypatch)
    assert found["kernels"] == ["attention"] and found["notes"] == []
    ours, theirs = fresh(), fresh()
    assert torch.equal(run(*ours)[0], function(*theirs))
    assert all(map(same, ours, theirs)) and not all(map(same, ours, fresh()))
    ours[list(tensors).index("slot_mapping")].fill_(1 << 20)
    with pytest.raises(RuntimeError, match=f"slot {1 << 20} of"):
        run(*ours)


@pytest.mark.slow
def test_a_graph_of_another_build_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_loaded", {"linear": "another-build"})
    _, found = lowered(linears, [X, WEIGHT, BIAS], monkeypatch)
    (note,) = found["notes"]
    assert "core_cpu_linear_another_build" in note
