"""Quantised layers from the tensors of a compressed-tensors checkpoint.

By format, of a layer `name`: float- and int-quantized have `name.weight` (codes), pack-quantized `name.weight_packed`
(int32) and `name.weight_shape`; all have `name.weight_scale`, asymmetric ones `name.weight_zero_point`, static ones
`name.input_scale` and `name.input_zero_point`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.common.ops.linear.weight_only import WORD_BITS, unpack, unpacked
from core.common.ops.quantize.symmetric import dequantize
from core.quantization.calibrate import Range
from core.quantization.config import CheckpointConfig, Group
from core.quantization.experts import QuantizedExperts, check_experts
from core.quantization.layers import QuantizedModule
from core.quantization.make import linear_of
from core.quantization.scheme import QuantizationScheme
from core.quantization.tensors import FLOATS, TensorFiles
from core.quantization.weights import Weight


def read_weight(files: TensorFiles, name: str, shape: tuple[int, int], group: Group) -> Weight:
    """Return the weight (N, K) of the layer stored as name; raise `ModelError` for what is missing or does not fit.

    A scale of 0 is taken where all its codes stand for 0 anyway, as tools write it for channels of zeros.
    """
    rows, columns = shape
    scheme = group.scheme.weights
    codes = _codes(files, name, shape, group)
    if scheme.group_size:
        if columns % scheme.group_size:
            raise files.error(f"{name} has {columns} inputs, which do not divide into groups of {scheme.group_size}")
        shapes: list[tuple[int, ...]] = [(rows, columns // scheme.group_size)]
        why = f" (groups of {scheme.group_size} of {columns} inputs)"
    else:
        shapes, why = [(rows, 1), (rows,), (1,), (1, 1), ()], f" ({rows} rows)"
    num_groups = shapes[0][1]
    scale = files.read(f"{name}.weight_scale", FLOATS, shapes, why)
    zero_point: Tensor | None = None
    if not scheme.symmetric:
        zero_point = _zero_point(files, name, rows, num_groups, group)
    elif files.has(f"{name}.weight_zero_point"):  # stored by some as zeros that nothing needs
        stored = files.read(f"{name}.weight_zero_point", (torch.int8, torch.int32, *FLOATS, torch.float8_e4m3fn))
        if not group.packed and bool((stored.to(torch.float32) != 0).any()):
            raise files.error(f"{name}.weight_zero_point is not zero, and quantization_config says symmetric")
    weight = Weight(codes=codes, scale=_by_row(scale.to(torch.float32), rows, num_groups), zero_point=zero_point)
    negative = int((scale < 0).sum())
    if negative:
        raise files.error(f"{name}.weight_scale is negative in {negative} of its {scale.numel()} values")
    lost = _lost_groups(weight, scheme.num_bits, columns)
    if lost:
        kind = "groups" if scheme.group_size else "channels"
        raise files.error(
            f"{name}.weight_scale is 0 for {lost} of {weight.scale.numel()} {kind} whose codes do not stand for 0"
        )
    return weight


def _lost_groups(weight: Weight, num_bits: int, columns: int) -> int:
    """Return the number of groups with a scale of 0 whose codes stand for something else than 0."""
    zeros = weight.scale == 0
    if not bool(zeros.any()):
        return 0
    codes = unpacked(weight.codes, num_bits, columns)
    steps = dequantize(codes, torch.ones_like(weight.scale), weight.zero_point, torch.float32)
    return int((zeros & (steps != 0).unflatten(-1, (weight.scale.shape[-1], -1)).any(-1)).sum())


def _codes(files: TensorFiles, name: str, shape: tuple[int, int], group: Group) -> Tensor:
    scheme = group.scheme.weights
    if files.has(f"{name}.weight_g_idx"):
        raise files.error(f"{name}.weight_g_idx: groups of reordered columns are not supported")
    if not group.packed:
        return files.read(f"{name}.weight", (scheme.dtype,), [shape])
    rows, columns = shape
    stored = files.read(f"{name}.weight_shape", (torch.int64, torch.int32), [(2,)])
    if tuple(stored.tolist()) != shape:
        raise files.error(f"{name}.weight_shape is {tuple(stored.tolist())}, the model's layer has {shape}")
    width = -(-columns * scheme.num_bits // WORD_BITS)
    why = f" ({columns} codes of {scheme.num_bits} bits)"
    words = files.read(f"{name}.weight_packed", (torch.int32,), [(rows, width)], why)
    return words if scheme.num_bits == 4 else unpack(words, scheme.num_bits, columns)


def _zero_point(files: TensorFiles, name: str, rows: int, num_groups: int, group: Group) -> Tensor:
    name, num_bits = f"{name}.weight_zero_point", group.scheme.weights.num_bits
    if not group.packed:
        stored = files.read(name, (torch.int8, torch.int32), [(rows, num_groups), (rows,), (1,), ()])
        return _by_row(stored.to(torch.int8), rows, num_groups)
    width = -(-rows * num_bits // WORD_BITS)
    words = files.read(name, (torch.int32,), [(width, num_groups)], f" ({rows} zero points of {num_bits} bits)")
    return unpack(words.t().contiguous(), num_bits, rows).t().contiguous()


def _by_row(stored: Tensor, rows: int, num_groups: int) -> Tensor:
    """Return (rows, num_groups) of one number for all, for each row, or for each group."""
    return stored.reshape(-1, num_groups if stored.numel() > 1 else 1).expand(rows, num_groups).contiguous()


def read_input(files: TensorFiles, name: str, scheme: QuantizationScheme) -> Range | None:
    """Return the range of inputs that a layer's static scale and zero point reach, None for a dynamic scheme."""
    if not scheme.needs_calibration:
        return None
    assert scheme.activations is not None
    scale = float(files.read(f"{name}.input_scale", FLOATS, [(1,), (), (1, 1)]).item())
    if scale <= 0:
        raise files.error(f"{name}.input_scale is {scale:g}, not positive")
    if scheme.activations.symmetric:
        # A zero point is stored by some for symmetric inputs too.
        if files.has(f"{name}.input_zero_point"):
            files.read(f"{name}.input_zero_point", (torch.int8, torch.int32, torch.float8_e4m3fn, *FLOATS))
        return Range.of(scheme.activations, scale, 0)
    kinds = (torch.int8, torch.int32)
    return Range.of(
        scheme.activations, scale, int(files.read(f"{name}.input_zero_point", kinds, [(1,), (), (1, 1)]).item())
    )


def read_linear(files: TensorFiles, name: str, layer: nn.Linear, group: Group, dtype: torch.dtype) -> QuantizedModule:
    """Return the quantised form of the model's layer at path name. dtype: of the bias."""
    weight = read_weight(files, name, (layer.out_features, layer.in_features), group)
    bias = None
    if layer.bias is not None:
        bias = files.read(f"{name}.bias", FLOATS, [(layer.out_features,)]).to(dtype)
    return linear_of(group.scheme, weight, bias, layer.in_features, read_input(files, name, group.scheme))


def read_experts(files: TensorFiles, name: str, experts: Any, config: CheckpointConfig) -> QuantizedExperts | None:
    """Return the quantised form of the model's experts at path name; None where none is quantised.

    The checkpoint has each expert's projections as linear layers of their own. Static scales are brought to one for all
    experts, which reaches what each of them reaches.
    """
    num_experts, hidden_dim, inner = experts.down_proj.shape
    has_gate: bool = getattr(experts, "has_gate", True)
    first = ("gate_proj", "up_proj") if has_gate else ("up_proj",)
    layers = {p: [f"{name}.{e}.{p}" for e in range(num_experts)] for p in (*first, "down_proj")}
    groups = {config.group_of(files.paths(layer), "Linear") for each in layers.values() for layer in each}
    if groups == {None}:
        return None
    group = groups.pop()
    if groups or group is None:
        raise files.error(f"the experts of {name} are not quantised alike")
    check_experts(name, experts)
    shapes = {**dict.fromkeys(first, (inner, hidden_dim)), "down_proj": (hidden_dim, inner)}
    read = {p: [read_weight(files, layer, shapes[p], group) for layer in each] for p, each in layers.items()}
    up = [_combined(torch.cat, parts) for parts in zip(*(read[p] for p in first), strict=True)]
    scales = []
    for kinds in (first, ("down_proj",)):
        seen = [read_input(files, layer, group.scheme) for kind in kinds for layer in layers[kind]]
        scales.append(_joined(group.scheme, seen))
    return QuantizedExperts(
        group.scheme,
        _combined(torch.stack, up),
        _combined(torch.stack, read["down_proj"]),
        experts.act_fn,
        has_gate=has_gate,
        inputs=scales[0],
        hidden=scales[1],
    )


def _combined(combine: Callable[[list[Tensor]], Tensor], weights: Sequence[Weight]) -> Weight:
    zeros = [w.zero_point for w in weights if w.zero_point is not None]
    # As bytes: not every op of torch takes fp8.
    dtype = weights[0].codes.dtype
    bits = torch.int32 if dtype == torch.int32 else torch.uint8
    return Weight(
        codes=combine([w.codes.view(bits) for w in weights]).view(dtype),
        scale=combine([w.scale for w in weights]),
        zero_point=combine(zeros) if zeros else None,
    )


def _joined(scheme: QuantizationScheme, seen: Sequence[Range | None]) -> tuple[Tensor | None, Tensor | None]:
    whole = Range()
    for each in seen:
        if each is None or scheme.activations is None:
            return None, None
        whole.merge(each)
    assert scheme.activations is not None
    return whole.scale(scheme.activations)
