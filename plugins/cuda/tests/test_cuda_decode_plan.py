"""The plan by which decode attention cuts sequences into shares, as each program computes it, and what comes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
import triton
import triton.language as tl

from core.common.ops.attention.paged import ATTENTION
from core_cuda.ops import launching, workspace
from core_cuda.ops.attention.decode import decode
from core_cuda.ops.attention.decode_config import DecodeConfig
from core_cuda.ops.attention.decode_plan import MOST_PARTS, UNITS_OF_NEW, planned, read_lengths
from core_cuda.ops.launching import start_next, wait_for_inputs
from tests.attention_cases import CACHES, CODES, judged, steps
from tests.kernel_cases import moved

BLOCK_N = 16
FAR_APART = ((1, 1), (1, 300), (1, 20), (2, 2), (1, 100))
CONSTANTS = {"MAX_NEW": 4, "WINDOWED": False, "CHUNKED": False, "AMONG_PROMPTS": False}


@triton.jit
def late_kernel(lengths, out, num_seqs, turns, OVERLAP: tl.constexpr) -> None:  # noqa: ANN001
    """Copy lengths long after the next kernel has been let start."""
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    passed = 1
    for _ in range(turns):
        passed = passed * 1103515245 + 12345
    seqs = tl.arange(0, 32)
    late = tl.load(lengths + seqs, mask=seqs < num_seqs) + tl.where(passed == 0, 1, 0)
    tl.store(out + seqs, late, mask=seqs < num_seqs)


@triton.jit
def plan_kernel(
    seq_lens, query_starts, out, num_seqs, window, helpers, join_ratio,  # noqa: ANN001
    MAX_NEW: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, AMONG_PROMPTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    first, last, length = read_lengths(seq_lens, query_starts, tl.arange(0, BLOCK_B), num_seqs, "")
    seq, share, num_shares, positions, parts = planned(first, last, length, program, num_seqs, window, helpers,
                                                       join_ratio, MAX_NEW, WINDOWED, CHUNKED, AMONG_PROMPTS, BLOCK_N,
                                                       BLOCK_B)  # fmt: skip
    out += program * 5
    tl.store(out, seq)
    tl.store(out + 1, share)
    tl.store(out + 2, num_shares)
    tl.store(out + 3, positions)
    tl.store(out + 4, parts)


def shares(
    lens: list[tuple[int, int]], helpers: int, device: torch.device, *, ratio: float = 1e6, window: int = 0, **how: bool
) -> list[list[int]]:
    """Return (sequence, share, number of shares, positions, parts before) of each program; lens: (new, length)."""
    new, length = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*lens, strict=True))
    starts = torch.cat((new.new_zeros(1), new.cumsum(0).to(torch.int32)))
    out = torch.full((len(lens) + helpers, 5), -1, dtype=torch.int32, device=device)
    constants = {**CONSTANTS, "WINDOWED": window > 0, **how}
    block = max(triton.next_power_of_2(len(lens)), 32)
    plan_kernel[(len(lens) + helpers,)](
        length, starts, out, len(lens), window, helpers, ratio, **constants, BLOCK_N=BLOCK_N, BLOCK_B=block
    )
    return out.tolist()


def units(new: int, length: int) -> int:
    return -(-max(length - new, 0) // BLOCK_N) + UNITS_OF_NEW.value if new else 0


def drawn(seed: int) -> tuple[list[tuple[int, int]], int]:
    """Draw sequences of lengths from alike to far apart, some without a new token, and a number of helpers."""
    generator = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(most + 1, (1,), generator=generator))

    spread, count = (0.0, 0.5, 2.0)[seed % 3], 1 + number(6)
    sizes = (torch.randn(count, generator=generator) * spread + 5).exp().int().tolist()
    return [(min(number(4), size + 1), size + 1) for size in sizes], 1 + number(20)


@pytest.mark.parametrize("seed", range(9))
def test_each_unit_has_one_program_and_each_part_a_place(seed: int, kernel_device: torch.device) -> None:
    lens, helpers = drawn(seed)
    total = sum(units(*each) for each in lens)
    fair = max(-(-total // helpers), 1)
    covered: dict[int, list[int]] = {}
    places = []
    for seq, share, num_shares, positions, parts in shares(lens, helpers, kernel_device):
        if seq == len(lens):
            continue
        assert 0 <= share < num_shares and positions % BLOCK_N == 0
        covered.setdefault(seq, []).append(share)
        size = positions // BLOCK_N
        assert size * num_shares >= units(*lens[seq]) > size * (num_shares - 1)
        assert size <= max(5 * fair // 4, 1) + 1
        if num_shares > 1:
            places.append(parts + share)
    assert {seq: len(found) for seq, found in covered.items()} == {
        seq: max(found) + 1 for seq, found in covered.items()
    }
    assert set(covered) == {seq for seq, each in enumerate(lens) if units(*each)}
    assert sorted(places) == list(range(len(places))) and len(places) <= MOST_PARTS.value * helpers


def test_lengths_alike_are_cut_alike(kernel_device: torch.device) -> None:
    lens = [(1, 1 + 30 * BLOCK_N)] * 4  # of 32 units
    for helpers, cut in ((1, 1), (4, 1), (5, 1), (6, 2), (8, 2), (13, 3), (16, 4)):
        found = [each for each in shares(lens, helpers, kernel_device) if each[0] < len(lens)]
        assert [each[:3] for each in found] == [[seq, share, cut] for seq in range(4) for share in range(cut)], helpers


def test_a_long_sequence_has_the_helpers(kernel_device: torch.device) -> None:
    lens = [(1, 20), (1, 1 + 126 * BLOCK_N), (0, 0), (1, 1)]
    found = [each[:3] for each in shares(lens, 16, kernel_device) if each[0] < len(lens)]
    assert found == [[0, 0, 1], *([1, share, 13] for share in range(13)), [3, 0, 1]]


def test_joining_limits_the_shares(kernel_device: torch.device) -> None:
    lens = [(1, 1 + 62 * BLOCK_N)]  # of 64 units
    for ratio in (1.0, 0.25, 1 / 64):
        found = shares(lens, 64, kernel_device, ratio=ratio)
        assert found[0][2] == math.isqrt(int(64 * ratio)), ratio


def test_windows_and_prompts(kernel_device: torch.device) -> None:
    lens = [(1, 1000), (1, 1000), (5, 1000)]
    windowed = shares(lens, 8, kernel_device, window=4 * BLOCK_N, AMONG_PROMPTS=True)
    assert [each[:3] for each in windowed if each[0] < 3] == [
        [0, 0, 3],
        [0, 1, 3],
        [0, 2, 3],
        *([1, n, 3] for n in range(3)),
    ]


@pytest.mark.parametrize("helpers", [3, 12])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": (6, 2), "sizes": (24, 40), "padding": (1, 2)},
        {"heads": (5, 1), "window": 90, "sinks": torch.tensor([-1.0, 0.5, 3.0, 4.0, 0.0])},
        {"heads": (3, 3), "softcap": 1.5, "window": 90, "chunked": True},
    ],
    ids=["plain", "three of a group", "window, sinks", "soft-cap, chunks"],
)
def test_lengths_far_apart(options: dict[str, Any], helpers: int, kernel_device: torch.device) -> None:
    call = steps(FAR_APART, dtype=torch.bfloat16, **options)
    config = DecodeConfig(block_n=BLOCK_N, helpers=helpers)
    result = judged(ATTENTION, decode, call, kernel_device, config=config, max_query_len=2)
    assert not workspace.counters(1, result.device).any()


def test_lengths_far_apart_in_codes(kernel_device: torch.device) -> None:
    call = steps(FAR_APART, dtype=torch.bfloat16, heads=(4, 2), k_scale=torch.tensor([0.5, 2.0]))
    call |= {name: call[name].to(CODES) for name in CACHES} | {"v_scale": torch.tensor(1.5)}
    judged(ATTENTION, decode, call, kernel_device, config=DecodeConfig(block_n=BLOCK_N, helpers=6), max_query_len=2)


@pytest.mark.gpu
@pytest.mark.skipif(launching.INTERPRETED or not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_lengths_that_the_kernel_before_writes_late() -> None:
    """The plan is made while the kernel before runs: by other lengths than those that it is about to write."""
    device = torch.device("cuda")
    call = moved(steps(FAR_APART, dtype=torch.bfloat16), device)
    call = {name: x for name, x in call.items() if name not in ("max_query_len", "mask")}
    config = DecodeConfig(block_n=BLOCK_N, helpers=6)

    def run() -> torch.Tensor:
        return decode(**call, config=config, max_query_len=2)

    wanted, lengths = run().clone(), call["seq_lens"].clone()
    for turns in (0, 100, 1_000, 10_000, 100_000):
        for before in (lengths.flip(0), torch.ones_like(lengths), lengths // 2 + 1):
            call["seq_lens"].copy_(before)
            torch.cuda.synchronize()
            launching.launch(late_kernel, (1,), lengths, call["seq_lens"], len(lengths), turns)
            assert torch.equal(run(), wanted), turns
    assert not workspace.counters(1, wanted.device).any()
