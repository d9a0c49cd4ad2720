"""The kernels of attention for few new tokens per sequence, the dispatch to them, and their counters."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import judge, judge_pooled
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.declaration import CanonicalOp
from core.errors import CaptureError

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import workspace
from core_cuda.ops.attention import decode as decode_attention
from core_cuda.ops.attention import decode_config
from core_cuda.ops.attention import prefill as prefill_attention
from core_cuda.ops.attention import rotation as attention_rotation
from core_cuda.ops.attention.decode_config import DecodeConfig, DecodeShape
from core_cuda.ops.attention.paged import attention_condition, rotary_attention_condition
from tests.kernel_cases import sample_call

Call = dict[str, Any]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPERANDS = ("query", "key", "value")
CACHES = ("key_cache", "value_cache")
# Shares of "finest" are single tiles, and new tokens have a program of their own.
CONFIGS = {name: DecodeConfig(block_n=16, helpers=n) for name, n in {"whole": 0, "split": 5, "finest": 64}.items()}


def names(op: CanonicalOp) -> list[str]:
    return [sample.name for sample in op.samples(torch.float32, CPU)]


def sample(op: CanonicalOp, name: str, dtype: torch.dtype) -> Call:
    return sample_call(op, name, dtype)


def bounded(call: Call) -> Call:
    """State how many new tokens the sequences bring at most, as the engine does in decode."""
    return call | {"max_query_len": int(call["query_starts"].diff().max())}


def moved(call: Call, device: torch.device) -> Call:
    """Copy the tensors to the device, with their strides: the op writes into the caches."""
    return {k: v.detach().clone().to(device) if isinstance(v, Tensor) else v for k, v in call.items()}


def run(op: CanonicalOp, call: Call, config: DecodeConfig | None = None) -> Tensor:
    """Run the kernel: by the op, or with a configuration of its own."""
    schema = op.overload._schema.arguments
    if config is None:
        operands = [call[a.name] for a in schema if not a.kwarg_only]
        options = {a.name: call[a.name] for a in schema if a.kwarg_only and a.name in call}
        return getattr(torch.ops.core_cuda, op.name)(*operands, **options)
    args = dict(op.bind((), call).args)
    if op is ROTARY_ATTENTION:
        args["turning"] = attention_rotation.take_turning(args)
    for name in ("mask", "causal"):
        args.pop(name, None)
    return decode_attention.decode(**args, config=config)


def in_fp64(call: Call) -> Call:
    """Widen what is floating-point; codes stay codes."""
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() and v.itemsize > 1 else v
        for k, v in call.items()
    }


def check(op: CanonicalOp, call: Call, device: torch.device, config: DecodeConfig | None = None) -> None:
    """Judge result and written keys of the kernel on the device; all else has to be as the reference leaves it."""
    ours, eager, exact = moved(call, device), moved(call, CPU), in_fp64(moved(call, CPU))
    dtypes = {name: torch.float64 for name, value in call.items() if isinstance(value, torch.dtype)}
    result, expected, truth = run(op, ours, config).cpu(), op.reference(**eager), op.reference(**exact | dtypes)
    assert result.stride() == expected.stride()
    real = int(call["query_starts"][-1])
    assert not result[real:].any()
    pooled = [[x[:real]] for x in (result, expected, truth)]
    slots = call["slot_mapping"][:real]
    if op is ROTARY_ATTENTION:
        written = [x["key_cache"].cpu().flatten(0, 1)[slots] for x in (ours, eager, exact)]
        verdict = judge(*written)
        assert verdict.passed, verdict
    verdict = judge_pooled(*pooled)
    assert verdict.passed, verdict
    for name in CACHES:
        mine, theirs = (x[name].cpu().flatten(0, 1) for x in (ours, eager))
        if op is ROTARY_ATTENTION and name == "key_cache":
            mine[slots] = theirs[slots]
        # Block 0 is nobody's. Bits, so that what was NaN is the same NaN.
        page = call[name].shape[1]
        assert torch.equal(*(x[page:].contiguous().view(torch.uint8) for x in (mine, theirs))), name
    for name, value in call.items():
        if isinstance(value, Tensor) and name not in CACHES:
            assert torch.equal(*(x.flatten().view(torch.uint8) for x in (ours[name].cpu(), value))), name
    assert not workspace.counters(1, result.device if device == CPU else ours["query"].device).any()


def steps(
    lens: tuple[tuple[int, int], ...],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 1),
    sizes: tuple[int, int] = (16, 16),
    page: int = 4,
    padding: tuple[int, int] = (0, 0),
    **options: Any,
) -> Call:
    """Build a call: lens gives (new tokens, length) per sequence; what holds no position of a sequence is NaN.

    padding: extra (tokens, sequences). max_query_len is the most new tokens unless given.
    """
    generator = torch.Generator().manual_seed(3)
    num_seqs, blocks_each = len(lens) + padding[1], max(-(-length // page) for _, length in lens) + 1
    order = 1 + torch.randperm(num_seqs * blocks_each, generator=generator)
    table = order.view(num_seqs, blocks_each).to(torch.int32)
    num_tokens, num_blocks = sum(new for new, _ in lens) + padding[0], 1 + num_seqs * blocks_each

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    call: Call = {name: randn(num_tokens, heads[name != "query"], sizes[name == "value"]) for name in OPERANDS}
    slots = [0] * num_tokens
    for name, size in zip(CACHES, sizes, strict=True):
        call[name] = torch.full((num_blocks, page, heads[1], size), torch.nan, dtype=dtype)
        number = 0
        for i, (new, length) in enumerate(lens):
            for position in range(length):
                block, offset = int(table[i, position // page]), position % page
                if position < length - new:
                    call[name][block, offset] = randn(heads[1], size)
                else:
                    slots[number] = block * page + offset
                    number += 1
    for name in OPERANDS:
        call[name][number:] = torch.nan
    starts = list(itertools.accumulate((new for new, _ in lens), initial=0))
    call |= {
        "block_table": table,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "seq_lens": torch.tensor([length for _, length in lens] + [0] * padding[1], dtype=torch.int32),
        "query_starts": torch.tensor(starts + starts[-1:] * padding[1], dtype=torch.int32),
        "scale": sizes[0] ** -0.5,
        "max_query_len": max(new for new, _ in lens),
    }
    return call | options


EDGES = ((1, 1), (1, 2), (1, 17), (1, 18), (1, 64), (1, 65), (1, 66))
CASES: dict[str, Call] = {
    "page and tile edges": {"lens": EDGES},
    "padding": {"lens": ((1, 40), (0, 0), (1, 3)), "padding": (3, 2)},
    "no cached position": {"lens": ((1, 1), (1, 1), (2, 2))},
    "window below a tile": {"lens": ((1, 1), (1, 20), (1, 66)), "window": 5},
    "window of one": {"lens": ((1, 1), (1, 34)), "window": 1},
    "window over several tiles": {"lens": ((1, 130), (1, 40), (1, 39)), "window": 40},
    "chunks below a tile": {"lens": ((1, 1), (1, 20), (1, 21), (1, 66)), "window": 5, "chunked": True},
    "chunks over several tiles": {"lens": ((1, 130), (1, 40), (1, 41), (1, 39)), "window": 40, "chunked": True},
    "sinks": {"lens": ((1, 100), (1, 1), (1, 18)), "sinks": torch.tensor([-1.0, 0.5, 3.0, 30.0])},
    "soft-cap": {"lens": ((1, 100), (1, 18)), "softcap": 1.5},
    "drafts": {"lens": ((3, 100), (1, 30), (2, 2), (3, 18), (1, 1)), "padding": (2, 1)},
    "drafts, window": {"lens": ((3, 100), (2, 2), (3, 18)), "window": 2},
    "drafts, chunks": {"lens": ((3, 98), (2, 2), (3, 17), (3, 16)), "window": 16, "chunked": True},
    "drafts, sinks": {"lens": ((3, 100), (1, 30)), "sinks": torch.tensor([-1.0, 0.5, 3.0, 4.0]), "window": 20},
    "bound above the drafts": {"lens": ((3, 100), (1, 30)), "max_query_len": 5},
    "pages of one": {"lens": ((1, 40), (1, 3)), "page": 1},
    "pages of 64": {"lens": ((1, 130), (2, 65)), "page": 64},
    "pages of 24": {"lens": ((1, 130), (2, 65)), "page": 24},
    "sizes that are no powers of two": {"lens": ((1, 50), (2, 3)), "sizes": (24, 40)},
    "value smaller than key": {"lens": ((1, 50), (2, 3)), "sizes": (32, 8)},
    "three heads of one": {"lens": ((1, 50), (2, 3)), "heads": (6, 2)},
    "one kv head": {"lens": ((1, 50), (4, 30)), "heads": (16, 1)},
    "no group": {"lens": ((1, 50), (2, 3)), "heads": (3, 3)},
    "lengths of int64": {"lens": ((1, 50), (2, 3)), "seq_lens": torch.tensor([50, 3])},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", names(ATTENTION))
def test_each_sample_agrees_with_the_reference(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    call = bounded(sample(ATTENTION, name, dtype))
    reason = attention_condition(ATTENTION.bind((), call))
    if call.get("mask") is not None:
        assert reason is not None and "mask" in reason
        return
    assert reason is None
    check(ATTENTION, call, kernel_device)


# Those that are samples of attention too say nothing new about rotation: they need not be run in every dtype.
OF_ATTENTION = [(name, torch.bfloat16) for name in names(ROTARY_ATTENTION) if name in names(ATTENTION)]
OTHERS = [name for name in names(ROTARY_ATTENTION) if name not in names(ATTENTION)]


@pytest.mark.parametrize(("name", "dtype"), [*OF_ATTENTION, *itertools.product(OTHERS, DTYPES)], ids=str)
def test_each_rotated_sample_agrees_with_the_reference(
    name: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    call = bounded(sample(ROTARY_ATTENTION, name, dtype))
    reason = rotary_attention_condition(ROTARY_ATTENTION.bind((), call))
    if name == "going on wide" and dtype != torch.float32:
        assert reason is not None and "out_dtype" in reason
        return
    assert reason is None
    check(ROTARY_ATTENTION, call, kernel_device, CONFIGS["split"] if name == "qwen3" else None)


# That shares are joined has nothing to do with pages and heads.
SPLIT_CASES = [name for name, case in CASES.items() if not {"page", "sizes", "heads"} & case.keys()]
RUNS = [(name, "whole") for name in CASES] + list(itertools.product(SPLIT_CASES, ("split", "finest")))


@pytest.mark.parametrize(
    "norm",
    [{"normed_dtype": torch.bfloat16}, {}, {"offset": 1.0}, {"offset": 1.0, "weight_dtype": torch.float32}],
    ids=str,
)
def test_the_norm_is_rounded_where_the_op_says(norm: Call, kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    call = steps(((1, 1), (1, 2), (1, 3), (1, 4)), dtype=torch.bfloat16, sizes=(256, 16), eps=1e-6, normalize=True)
    weights = torch.randn(2, 256, generator=generator).to(torch.bfloat16)
    call |= {
        "cos": torch.ones(4, 256),
        "sin": torch.zeros(4, 256),
        "query_weight": weights[0],
        "key_weight": weights[1],
    }
    ours, eager = moved(call | norm, kernel_device), moved(call | norm, CPU)
    run(ROTARY_ATTENTION, ours)
    ROTARY_ATTENTION.reference(**eager)
    written = [x["key_cache"].cpu().flatten(0, 1)[call["slot_mapping"]] for x in (ours, eager)]
    # The square roots of two libraries may differ in the last place of fp32, which seldom moves a value in bfloat16.
    assert (written[0] != written[1]).sum() <= 0.01 * written[0].numel()


@pytest.mark.parametrize("turning", [{}, {"normalize": True, "eps": 1e-6}, {"style": "interleaved", "rotary_dim": 32}])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_token_is_turned_before_its_attention(
    turning: Call, dtype: torch.dtype, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(6)
    call = steps(((1, 40),), dtype=dtype, sizes=(64, 64), window=33, sinks=torch.tensor([-1.0, 0.5, 3.0, 2.0]))
    for name in ("cos", "sin"):
        call[name] = torch.rand(1, turning.get("rotary_dim", 64), generator=generator).to(dtype)
    if turning.get("normalize"):
        turning = turning | {f"{name}_weight": torch.rand(64, generator=generator).to(dtype) for name in OPERANDS[:2]}
    given = []
    decode = decode_attention.decode
    monkeypatch.setattr(
        decode_attention, "decode", lambda *a, **kw: given.append(kw.get("turning")) or decode(*a, **kw)
    )
    check(ROTARY_ATTENTION, call | turning, kernel_device)
    assert given == [None]


@pytest.mark.parametrize(("case", "config"), RUNS)
def test_decode(case: str, config: str, kernel_device: torch.device) -> None:
    call = steps(**CASES[case])
    assert decode_attention.serves(call["query"].shape[1], call["key"].shape[1], call["max_query_len"])
    check(ATTENTION, call, kernel_device, CONFIGS[config])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", ["padding", "drafts, sinks", "soft-cap"])
def test_decode_in_half_precision(case: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    check(ATTENTION, steps(**CASES[case], dtype=dtype, sizes=(64, 64)), kernel_device, CONFIGS["finest"])


CALL = steps(((3, 40), (1, 30)), heads=(4, 2), page=8)


def test_each_candidate(kernel_device: torch.device) -> None:
    call = steps(((2, 300),), dtype=torch.bfloat16, sizes=(64, 64), page=16)
    operands = (call[name] for name in ("query", "value", "key_cache", "block_table"))
    configs = list(decode_config.candidates(decode_attention.shape_of(*operands, window=0, max_query_len=2)))
    if kernel_device == CPU:  # where warps and stages make no difference
        plain = [dataclasses.replace(config, num_warps=4, num_stages=1, fetch=0) for config in configs]
        configs = list(dict.fromkeys(plain))
    assert len(configs) > 5
    for config in configs:
        check(ATTENTION, call, kernel_device, config)


def test_candidates_are_few_and_begin_with_the_chosen_one() -> None:
    for num_seqs, rows, size in itertools.product((1, 8, 64, 512), (1, 4, 16, 64), (64, 128, 192, 256, 512)):
        sizes = {"head_size": size, "value_size": size, "num_positions": 4096, "itemsize": 2}
        shape = DecodeShape(num_seqs=num_seqs, num_kv_heads=8, num_rows=rows, **sizes)
        configs = list(decode_config.candidates(shape))
        assert configs[0] == decode_config.choose(shape)
        assert len(configs) == len(set(configs)) <= 50
        assert all(config.helpers <= num_seqs * (4096 // config.block_n + 1) for config in configs)
        # Shared memory of a program is 227 KiB; a tile of keys and one of values per stage but one, and the query's.
        tiles = max(config.block_n * (config.num_stages - 1) for config in configs) * 2 * size * 2
        assert tiles <= 200 * 1024


@pytest.mark.parametrize("op", [ATTENTION, ROTARY_ATTENTION], ids=lambda op: op.name)
def test_the_op_takes_the_kernel_of_its_tokens(op: CanonicalOp, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    kernels = {decode_attention: ["decode"], prefill_attention: ["prefill", "prefill_rotary_attention"]}
    for module, functions in kernels.items():
        for name in functions:
            monkeypatch.setattr(module, name, lambda *_, which=name, **__: taken.append(which) or torch.empty(4, 4, 16))
    tables = {"cos": torch.zeros(4, 16), "sin": torch.zeros(4, 16)} if op is ROTARY_ATTENTION else {}
    for options in ({"max_query_len": 3}, {"max_query_len": 32}, {"max_query_len": 33}, {"max_query_len": 0}):
        run(op, CALL | tables | options)
    prefill = "prefill" if op is ATTENTION else "prefill_rotary_attention"
    assert taken == ["decode", "decode", prefill, prefill]


def test_a_call_again_gives_the_same_bits(kernel_device: torch.device) -> None:
    results = [run(ATTENTION, moved(CALL, kernel_device), CONFIGS["split"]) for _ in range(3)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_parts_of_wider_tensors_are_read_where_they_are(kernel_device: torch.device) -> None:
    merged = torch.cat([CALL[name] for name in OPERANDS], 1)
    heads = {name: CALL[name].shape[1] for name in OPERANDS}
    parts = dict(zip(OPERANDS, merged.split(list(heads.values()), 1), strict=True))
    caches = torch.stack([CALL[name] for name in CACHES], 2).unbind(2)
    table = torch.cat([CALL["block_table"]] * 2, 1)[:, : CALL["block_table"].shape[1]]
    call = CALL | parts | dict(zip(CACHES, caches, strict=True)) | {"block_table": table}
    assert not call["query"].is_contiguous() and not call["key_cache"].is_contiguous()
    check(ATTENTION, call, kernel_device, CONFIGS["split"])


def test_no_sequences_and_no_tokens(kernel_device: torch.device) -> None:
    call = moved(CALL, kernel_device)
    none = call | {"block_table": call["block_table"][:0], "seq_lens": call["seq_lens"][:0]}
    none["query_starts"] = call["query_starts"][:1]
    assert not run(ATTENTION, none).any()
    call |= {name: call[name][:0] for name in (*OPERANDS, "slot_mapping")}
    assert run(ATTENTION, call | {"query_starts": call["query_starts"] * 0}).shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"query": CALL["query"].double()}, "torch.float64"),
        ({"key_cache": CALL["key_cache"].half()}, "key_cache"),
        ({"key_cache": CALL["key_cache"].transpose(2, 3).contiguous().transpose(2, 3)}, "one run"),
        ({"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks"),
        ({"mask": torch.ones(4, 1, 1, dtype=torch.bool)}, "mask"),
        ({"value_cache": torch.empty(2, 8, 2, 1024)}, "1024"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refuses(changes: Call, word: str) -> None:
    assert attention_condition(ATTENTION.bind((), CALL)) is None
    reason = attention_condition(ATTENTION.bind((), CALL | changes))
    assert reason is not None and word in reason


@pytest.mark.parametrize(
    "changes",
    [
        {"cos": torch.zeros(4, 16, dtype=torch.float64)},
        {"query_weight": torch.zeros(16)},
        {"query_weight": torch.zeros(16), "key_weight": torch.zeros(16).half()},
        {"normed_dtype": torch.float64},
        {"norm_compute_dtype": torch.float64},
        {"compute_dtype": torch.bfloat16},
        {"out_dtype": torch.bfloat16},
    ],
    ids=lambda x: ", ".join(x),
)
def test_refuses_to_rotate(changes: Call) -> None:
    call = CALL | {"cos": torch.zeros(4, 16), "sin": torch.zeros(4, 16)}
    assert rotary_attention_condition(ROTARY_ATTENTION.bind((), call)) is None
    reason = rotary_attention_condition(ROTARY_ATTENTION.bind((), call | changes))
    assert reason is not None and next(iter(changes)) in reason


def test_counters_grow_and_keep_what_graphs_hold(kernel_device: torch.device) -> None:
    device = torch.empty(0, device=kernel_device).device
    first = workspace.counters(1, device)
    assert first.dtype == torch.int32 and workspace.counters(1, device) is first
    larger = workspace.counters(len(first) + 1, device)
    assert len(larger) > len(first) and not larger.any()
    assert workspace.counters(1, device) is larger
    assert any(first is buffer for buffers in workspace._BUFFERS.values() for buffer in buffers)


def test_counters_are_not_made_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=-7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="once on this stream"):
        workspace.counters(1, torch.device("cuda", 0))
