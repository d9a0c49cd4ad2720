"""`core::attention` for steps with prompts: any mix of fresh prompts, chunks behind a cached context and single tokens.

The step's own keys and values are read where the projection left them, only those of earlier steps from the cache: the
write of the cache and the attention may run in either order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from core.common.ops.implementation import OpCall
from core_cuda.ops import launching
from core_cuda.ops.attention import hopper
from core_cuda.ops.attention.decode import Coding, decode, serves, shape_of
from core_cuda.ops.attention.decode_config import why_no_room
from core_cuda.ops.attention.hopper import HopperConfig
from core_cuda.ops.attention.hopper_tiles import Numbers, Step
from core_cuda.ops.attention.prefill_config import VALUE_PART, PrefillConfig, PrefillShape, choose, measured
from core_cuda.ops.attention.prefill_kernel import Spec, prefill_kernel
from core_cuda.ops.cache_write import head_stride, why_not_cache, why_not_dtypes, write_cache
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.rotary import rotation as rotary
from core_cuda.ops.rotary.rotation import RotaryConfig, rotate_and_write

_LARGEST_HEAD = 512
# The arguments of `core::rotary_attention` that belong to the attention.
_OPTIONS = ("scale", "window", "chunked", "softcap", "sinks", "k_scale", "v_scale", "coding")
_LOG2_E = 1 / math.log(2)
_TMA_BYTES = 16  # alignment of what a tensor descriptor describes


def why_not(call: OpCall) -> str | None:
    """Return why `prefill` cannot take a call of `core::attention`, or None."""
    args = call.args
    if args.get("mask") is not None:
        return "it has a mask, and the kernel takes none"
    query = args["query"]
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if reason := why_not_dtypes(call):
        return reason
    if args["sinks"] is not None and args["sinks"].dtype == torch.float64:
        return "sinks are torch.float64, and the kernel computes in torch.float32"
    size, value_size = args["query"].shape[2], args["value"].shape[2]
    if size > _LARGEST_HEAD:
        return f"heads have {size} features, and the kernel takes {_LARGEST_HEAD} at most"
    if value_size > VALUE_PART and value_size != _LARGEST_HEAD:
        return f"heads of value have {value_size} features, and the kernel takes up to {VALUE_PART}, or {_LARGEST_HEAD}"
    if args["scale"] <= 0:
        return f"scale is {args['scale']}, and the kernel takes positive ones"
    return why_not_cache("key_cache", args["key_cache"]) or why_not_cache("value_cache", args["value_cache"])


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    **options: Any,
) -> Tensor:
    """Write key and value into the cache and attend, as `core::attention` says; for calls that `why_not` lets pass.

    The tensors are those of `core::attention`, the options those of `attend`. Returns (T, H, V).
    """
    scales = (options.get("k_scale"), options.get("v_scale"))
    key, value = write_cache(key, value, key_cache, value_cache, slot_mapping, query_starts, *scales)
    return attend(query, key, value, key_cache, value_cache, block_table, seq_lens, query_starts, **options)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    coding: Coding | None = None,
    config: PrefillConfig | HopperConfig | None = None,
) -> Tensor:
    """Return what `prefill` returns without writing the cache, of which it reads only what earlier steps wrote.

    Where the cache holds codes, key and value hold what these stand for. coding: the codes that the result becomes, and
    is returned as. config overrides the configuration chosen by shape.
    """
    rows = (query, key, value, block_table)
    query, key, value, block_table = (x if x.stride(-1) == 1 else x.contiguous() for x in rows)
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, value_size, num_seqs = key.shape[1], value.shape[2], seq_lens.shape[0]
    # A sequence with one new token fills a tile with little more than padding: decode's kernel serves it sooner.
    prompts_only = causal and num_seqs > 1 and serves(num_heads, num_kv_heads, 1)
    prompts_only = prompts_only and why_no_room(shape_of(query, value, key_cache, block_table, window, 1)) is None
    out = query.new_empty((num_tokens, num_heads, value_size)) if coding is None else coding.codes
    if num_tokens == 0:
        if coding is not None:
            coding.used.copy_(coding.scale)
        return out
    scales = (None, None) if coding is None else (coding.scale, coding.used)
    caches = (key_cache, value_cache, block_table, seq_lens, query_starts)
    step = Step(query, key, value, *caches, sinks, out, *scales)
    strides = [stride for x in (query, key, value) for stride in x.stride()[:2]]
    strides += [stride for x in (key_cache, value_cache) for stride in x.stride()[1:3]]
    strides += [block_table.stride(0), out.stride(1)]
    of_scores = scale / softcap if softcap else scale * _LOG2_E
    numbers = Numbers(num_tokens, num_seqs, of_scores, window, *strides)
    if config is None:
        config = hopper.choose(step, window, softcap)
    if isinstance(config, HopperConfig):
        hopper.launch(step, numbers, config, causal=causal, chunked=chunked, prompts_only=prompts_only)
    else:
        how: dict[str, Any] = {"causal": causal, "chunked": chunked, "softcap": softcap, "codes": (k_scale, v_scale)}
        _launch(step, numbers, config, **how, prompts_only=prompts_only)
    if prompts_only:
        options: dict[str, Any] = {"scale": scale, "window": window, "chunked": chunked, "softcap": softcap}
        options |= {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "coding": coding}
        options |= {"prompts": out, "max_query_len": 1}
        decode(query, key, value, key_cache, value_cache, block_table, None, seq_lens, query_starts, **options)
    return out


def _launch(
    step: Step,
    numbers: Numbers,
    config: PrefillConfig | None,
    *,
    causal: bool,
    chunked: bool,
    softcap: float,
    codes: tuple[Tensor | None, Tensor | None],
    prompts_only: bool,
) -> None:
    """Write the attention of a step into step.out by `prefill_kernel`; codes: the scales of key and value caches."""
    query, key, value = step.query, step.key, step.value
    num_tokens, num_heads, size = query.shape
    num_kv_heads, value_size, num_seqs = key.shape[1], value.shape[2], numbers.num_seqs
    shape = PrefillShape(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_size=size,
        value_size=value_size,
        element_bytes=query.element_size(),
    )
    config = config or measured(shape) or choose(shape)
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (size, min(value_size, VALUE_PART)))
    tma = config.tma and launching.has_descriptors() and _can_describe(key) and _can_describe(value)
    group, pack = num_heads // num_kv_heads, config.pack
    spec = Spec(
        causal=causal,
        window=numbers.window > 0,
        chunked=chunked,
        softcap=softcap != 0,
        tma=tma,
        group=group,
        pack=pack,
        page=step.key_cache.shape[1],
        d=size,
        v=min(value_size, VALUE_PART),
        block_m=config.block_m,
        block_n=config.block_n,
        block_d=block_d,
        block_v=block_v,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        stages=config.num_stages,
        k_scale=head_stride(codes[0]),
        v_scale=head_stride(codes[1]),
        prompts_only=prompts_only,
    )
    launching.launch(
        prefill_kernel,
        (
            num_kv_heads * triton.cdiv(group, pack),
            num_tokens // (config.block_m // pack) + num_seqs + 1,
            triton.cdiv(value_size, block_v),
        ),
        query,
        _described(key, config.block_n, block_d) if tma else key,
        _described(value, config.block_n, block_v) if tma else value,
        *step[3:10],
        *codes,
        *step[10:],
        *numbers[:3],
        softcap * _LOG2_E,
        *numbers[3:],
        SPEC=spec,
        BLOCK_B=triton.next_power_of_2(num_seqs + 1),
        num_warps=config.num_warps,
    )


def why_not_rotary(call: OpCall) -> str | None:
    """Return why `prefill_rotary_attention` cannot take a call of `core::rotary_attention`, or None."""
    out_dtype, dtype = call.args["out_dtype"], call.args["query"].dtype
    if out_dtype not in (None, dtype):
        # The key goes on in the cache's dtype, and the two have one product.
        return f"out_dtype is {out_dtype} and query {dtype}, and the kernel takes one dtype"
    return rotary.why_not(call) or why_not(call)


def prefill_rotary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    config: PrefillConfig | HopperConfig | None = None,
    rotary_config: RotaryConfig | None = None,
    **options: Any,
) -> Tensor:
    """Rotate, write the cache and attend: `core::rotary_attention` of calls that `why_not_rotary` lets pass.

    Arguments, but for max_query_len, and result (T, H, V) as there; config and rotary_config override those chosen by
    shape; coding as for `prefill`. Two launches: the second reads the rotated key from the buffer of the first, not
    from the cache.
    """
    attention = {name: options.pop(name) for name in _OPTIONS if name in options}
    new = (key_cache, value_cache, slot_mapping, query_starts)
    options |= {name: attention.get(name) for name in ("k_scale", "v_scale")}
    query, key, value = rotate_and_write(query, key, value, cos, sin, *new, config=rotary_config, **options)
    old = (key_cache, value_cache, block_table, seq_lens, query_starts)
    return attend(query, key, value, *old, **attention, config=config)


def _can_describe(x: Tensor) -> bool:
    """Return whether a tensor descriptor can address x (T, heads, features)."""
    aligned = x.data_ptr() % _TMA_BYTES == 0
    return aligned and all(s > 0 and s * x.element_size() % _TMA_BYTES == 0 for s in x.stride()[:2])


def _described(x: Tensor, block_n: int, block: int) -> TensorDescriptor:
    """Describe x (T, heads, features) as (heads, T, features), loaded by (1, block_n, block); zeros lie beyond."""
    x = x.transpose(0, 1)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, block_n, block])
