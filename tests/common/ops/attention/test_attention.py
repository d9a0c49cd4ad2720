"""core/common/ops/attention/paged.py against an oracle of its own, tests/common/ops/attention/attention_oracle.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.numerics import Verdict, judge
from core.common.ops.attention.paged import ATTENTION, reference
from tests.common.ops.attention.attention_oracle import Call, eager, oracle, slots_of, write
from tests.kernel_cases import sample_call

CPU = torch.device("cpu")
NAMES = [sample.name for sample in ATTENTION.samples(torch.float32, CPU)]
POSITIONAL = [a.name for a in ATTENTION.overload._schema.arguments if not a.kwarg_only]


def sample(name: str, dtype: torch.dtype = torch.float32) -> Call:
    return sample_call(ATTENTION, name, dtype)


def copied(call: Call) -> Call:
    """Copy the tensors with their strides: the op writes into the caches."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in call.items()}


def run(call: Call) -> Tensor:
    args = [call[name] for name in POSITIONAL]
    return torch.ops.core.attention(*args, **{k: v for k, v in call.items() if k not in POSITIONAL})


def verdict(call: Call, **wrong: Any) -> Verdict:
    """Judge the op on `call`, its arguments changed by `wrong`, against eager and oracle on `call` as it is."""
    truth = copied(call)
    write(truth)
    acc = torch.float64 if call["query"].dtype == torch.float64 else torch.float32
    return judge(run(copied(call) | wrong), eager(truth, acc), oracle(truth))


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_sample_agrees_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    result = verdict(sample(name, dtype))
    assert result.passed, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_between_graphs_each_sequence_attends_by_itself(name: str, dtype: torch.dtype) -> None:
    assert ATTENTION.eager is not None
    call, by_itself = copied(sample(name, dtype)), copied(sample(name, dtype))
    real = int(call["query_starts"][-1])
    truth = copied(call)
    write(truth)
    ours = ATTENTION.eager(**by_itself)
    result = judge(ours[:real], eager(truth, torch.float32)[:real], oracle(truth)[:real])
    assert result.passed and not ours[real:].any(), result
    run(call)
    for cache in ("key_cache", "value_cache"):
        assert torch.equal(by_itself[cache][1:], call[cache][1:])  # block 0 is nobody's


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("prefill", {"scale": 0.25 * 1.02}),
        ("window 3", {"window": 4}),
        ("window 3", {"chunked": True}),
        ("chunks of 3", {"window": 4}),
        ("chunks of 3", {"chunked": False}),
        ("chunks of 5, decode", {"chunked": False}),
        ("soft-cap", {"softcap": 2.4}),
        ("sinks", {"sinks": None}),
        ("boolean mask", {"mask": None}),
        ("bidirectional", {"causal": True}),
        ("chunk and mixed", {"block_table": sample("chunk and mixed")["block_table"].flip(1)}),
        ("chunk and mixed", {"seq_lens": sample("chunk and mixed")["seq_lens"] - 1}),
        ("codes, decode", {"k_scale": torch.tensor(0.0235)}),
        ("codes, a scale per head", {"v_scale": torch.tensor(0.03067)}),
        ("codes, a scale per head", {"k_scale": sample("codes, a scale per head")["k_scale"].flip(0)}),
    ],
)
def test_the_oracle_sees_a_wrong_argument(name: str, wrong: Call) -> None:
    assert not verdict(sample(name), **wrong).passed


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_written_exactly(name: str) -> None:
    call, truth = copied(sample(name)), copied(sample(name))
    run(call)
    write(truth)
    for cache in ATTENTION.mutates:
        # Several padding tokens may write one slot of the null block; which one stays is not promised.
        assert torch.equal(call[cache][1:], truth[cache][1:]), cache
    untouched = {k: v for k, v in call.items() if isinstance(v, Tensor) and k not in ATTENTION.mutates}
    assert all(torch.equal(v, sample(name)[k]) for k, v in untouched.items())


def test_an_unwritten_cache_would_be_seen() -> None:
    call, before = copied(sample("decode")), sample("decode")
    run(call)
    assert not torch.equal(call["key_cache"][1:], before["key_cache"][1:])


@pytest.mark.parametrize("name", ["decode padded", "chunk and mixed", "window 3", "boolean mask", "bidirectional"])
def test_nan_in_slots_that_hold_nothing_does_not_leak(name: str) -> None:
    clean, poisoned = copied(sample(name)), copied(sample(name))
    used = {slot for i in range(len(clean["seq_lens"])) for slot in slots_of(clean, i)}
    for cache in ("key_cache", "value_cache"):
        num_blocks, page = poisoned[cache].shape[:2]
        free = [(b, o) for b in range(num_blocks) for o in range(page) if (b, o) not in used]
        assert (0, 0) in free
        for slot in free:
            poisoned[cache][slot] = torch.nan
    padding = int(poisoned["query_starts"][-1])
    for operand in ("query", "key", "value"):
        poisoned[operand][padding:] = torch.nan
    assert torch.equal(run(poisoned), run(clean))


@pytest.mark.parametrize("options", [{"window": 0}, {"window": 3, "causal": False}], ids=str)
def test_chunks_have_a_size_and_are_causal(options: Call) -> None:
    with pytest.raises(RuntimeError, match="chunks are causal and of a window's size"):
        run(copied(sample("prefill")) | {"chunked": True, **options})


def test_blocks_of_earlier_chunks_may_be_freed() -> None:
    clean, freed = copied(sample("chunks of 5, decode")), copied(sample("chunks of 5, decode"))
    # The third sequence decodes position 13, which sees from 10 on: its first two blocks of 4 positions are done with.
    assert freed["seq_lens"].tolist() == [5, 6, 14]
    freed["block_table"][2, :2] = 0
    freed["key_cache"][0] = freed["value_cache"][0] = torch.nan
    assert torch.equal(run(freed), run(clean))


def test_blocks_that_left_the_window_may_be_freed() -> None:
    clean, freed = copied(sample("window 3")), copied(sample("window 3"))
    # The second sequence decodes position 7: of its two blocks of 4 positions the window still touches 5 to 7.
    assert freed["seq_lens"].tolist() == [9, 8] and freed["query_starts"].tolist() == [0, 9, 10]
    freed["block_table"][1, 0] = 0
    freed["key_cache"][0] = freed["value_cache"][0] = torch.nan
    assert torch.equal(run(freed), run(clean))


@pytest.mark.parametrize("name", ["decode padded", "chunk and mixed"])
def test_padding_rows_come_back_as_zero(name: str) -> None:
    call = sample(name)
    real = int(call["query_starts"][-1])
    out = run(copied(call))
    assert out.shape[0] > real
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))
    assert (out[:real] != 0).all()


def test_a_token_that_sees_nothing_gets_zero() -> None:
    call = copied(sample("boolean mask"))
    call["mask"][2] = False
    out = run(call)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert out.isfinite().all()


def test_a_batch_of_padding_only() -> None:
    call = copied(sample("decode padded"))
    call["seq_lens"].zero_()
    call["query_starts"].zero_()
    call["slot_mapping"].zero_()
    out = run(call)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("chunk and mixed", {"window": 10_000}),
        ("chunk and mixed", {"max_query_len": 7}),
        ("decode", {"max_query_len": 0}),
        ("prefill", {"mask": torch.ones(16, 1, 12, dtype=torch.bool)}),
    ],
    ids=["window beyond the context", "known query length", "unknown query length", "mask that hides nothing"],
)
def test_these_arguments_change_nothing(name: str, change: Call) -> None:
    call = sample(name, torch.float64)
    torch.testing.assert_close(run(copied(call) | change), run(copied(call)), rtol=0, atol=1e-13)


def test_lengths_may_be_int64() -> None:
    call = sample("chunk and mixed")
    wide = {name: call[name].long() for name in ("seq_lens", "query_starts")}
    assert torch.equal(run(copied(call) | wide), run(copied(call)))


def test_a_prompt_in_two_chunks_equals_one() -> None:
    whole = copied(sample("one kv head", torch.float64))
    chunks = copied(whole)
    outs = []
    for rows, length in ((slice(0, 3), 3), (slice(3, 4), 4)):
        parts = {name: chunks[name][rows] for name in ("query", "key", "value", "slot_mapping")}
        num_rows = rows.stop - rows.start
        starts = torch.tensor([0, num_rows], dtype=torch.int32)
        outs.append(run(chunks | parts | {"seq_lens": torch.tensor([length]).int(), "query_starts": starts}))
    torch.testing.assert_close(torch.cat(outs), run(whole), rtol=0, atol=1e-13)
    assert torch.equal(chunks["key_cache"], whole["key_cache"])


def test_a_prompt_in_chunks_and_token_by_token_reads_the_same_codes() -> None:
    whole = copied(sample("codes, no scale", torch.float64))
    options = {"k_scale": torch.tensor(0.013).double(), "v_scale": torch.tensor([0.03, 0.011]).double(), "window": 0}
    num_rows = 7
    last = {name: whole[name][-num_rows:] for name in ("query", "key", "value", "slot_mapping")}
    whole |= last | options | {"block_table": whole["block_table"][2:3]}
    chunks, outs = copied(whole), []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 7)):
        parts = {name: chunks[name][rows] for name in last}
        starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        outs.append(run(chunks | parts | {"seq_lens": torch.tensor([rows.stop]).int(), "query_starts": starts}))
    whole |= {"seq_lens": torch.tensor([num_rows]).int(), "query_starts": torch.tensor([0, num_rows]).int()}
    torch.testing.assert_close(torch.cat(outs), run(whole), rtol=0, atol=1e-13)
    assert torch.equal(*(call["key_cache"].view(torch.uint8) for call in (chunks, whole)))


def test_what_a_quantised_cache_costs_is_the_rounding_of_its_codes() -> None:
    wide = copied(sample("prefill", torch.float64))
    codes = copied(wide)
    for cache, scale in (("key_cache", "k_scale"), ("value_cache", "v_scale")):
        codes |= {cache: wide[cache].to(torch.float8_e4m3fn), scale: torch.tensor(0.01).double()}
    off = float((run(codes) - run(wide)).norm() / run(wide).norm())
    assert 2**-7 < off < 2**-3  # half of 2**-3 is how far a code is off at most, relative to it


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["decode padded", "window 3", "sinks", "additive mask per head"])
def test_torch_accepts_the_registration(name: str) -> None:
    call = sample(name)
    torch.library.opcheck(ATTENTION.overload, tuple(call.pop(arg) for arg in POSITIONAL), call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_fake_gives_the_metadata_of_the_real_one(name: str, dtype: torch.dtype) -> None:
    call = sample(name, dtype)
    real = run(copied(call))
    mode = FakeTensorMode()
    with mode:
        fake = run({k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()})
    assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (real.shape, real.dtype, real.device, real.stride())


NEAR_MISSES: dict[str, tuple[Call, str]] = {
    "query of rank 2": ({"query": torch.ones(16, 64)}, "query must have rank 3"),
    "cache of rank 3": ({"value_cache": torch.ones(8, 2, 16)}, "value_cache must have rank 4"),
    "heads no multiple": ({"query": torch.ones(16, 3, 16)}, "3 query heads are no multiple of 2"),
    "other head size": ({"key": torch.ones(16, 2, 8)}, "differ in heads or head size"),
    "int32 slots": ({"slot_mapping": torch.zeros(16, dtype=torch.int32)}, "slot_mapping must be torch.int64"),
    "int64 blocks": ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, "block_table must be torch.int32"),
    "flat block table": ({"block_table": torch.zeros(6, dtype=torch.int32)}, "block_table must have rank 2"),
    "floating lengths": ({"seq_lens": torch.ones(2)}, "seq_lens must be torch.int32 or torch.int64"),
    "a scale of no codes": (
        {"v_scale": torch.ones(())},
        "v_scale given, and value_cache is torch.float32, no cache of",
    ),
    "a scale per token": (
        {"key_cache": torch.zeros(8, 4, 2, 16, dtype=torch.float8_e4m3fn), "k_scale": torch.ones(16)},
        r"k_scale must have shape \(\) or \(2,\), one for each head, not \(16,\)",
    ),
    "a narrow scale": (
        {"key_cache": torch.zeros(8, 4, 2, 16, dtype=torch.float8_e4m3fn), "k_scale": torch.ones(2).half()},
        "k_scale must be torch.float32, not torch.float16",
    ),
}


@pytest.mark.parametrize("faked", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str, faked: bool) -> None:
    change, message = NEAR_MISSES[near_miss]
    call = copied(sample("prefill")) | change
    if not faked:
        with pytest.raises(RuntimeError, match=message):
            run(call)
        return
    mode = FakeTensorMode()
    fakes = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()}
    with mode, pytest.raises(RuntimeError, match=message):
        run(fakes)


@st.composite
def layouts(draw: st.DrawFn) -> Call:
    """Draw sequences of any query and context length, pages in any order, padding, and options."""
    lens = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=4))
    extra_tokens, extra_seqs = draw(st.tuples(st.integers(0, 3), st.integers(0, 2)))
    page, (heads, kv_heads) = draw(st.integers(1, 5)), draw(st.sampled_from([(4, 4), (4, 2), (6, 1)]))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    width = max(-(-(new + old) // page) for new, old in lens) or 1
    table = torch.zeros(len(lens) + extra_seqs, width, dtype=torch.int32)
    table[: len(lens)] = 1 + torch.randperm(len(lens) * width, generator=gen).view(len(lens), width)
    slots = [
        int(table[i, p // page]) * page + p % page for i, (new, old) in enumerate(lens) for p in range(old, old + new)
    ]
    starts = [sum(new for new, _ in lens[:i]) for i in range(len(lens) + 1)]
    num_tokens = max(len(slots) + extra_tokens, 1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, 16, generator=gen)

    return {
        "query": randn(num_tokens, heads),
        "key": randn(num_tokens, kv_heads),
        "value": randn(num_tokens, kv_heads),
        "key_cache": randn(1 + len(lens) * width, page, kv_heads),
        "value_cache": randn(1 + len(lens) * width, page, kv_heads),
        "block_table": table,
        "slot_mapping": torch.tensor(slots + [0] * (num_tokens - len(slots)), dtype=torch.int64),
        "seq_lens": torch.tensor([new + old for new, old in lens] + [0] * extra_seqs, dtype=torch.int32),
        "query_starts": torch.tensor(starts + [starts[-1]] * extra_seqs, dtype=torch.int32),
        "scale": draw(st.sampled_from([0.25, 0.4])),
        **draw(st.sampled_from(_SIGHTS)),
        "sinks": draw(st.sampled_from([None, torch.linspace(-1, 2, heads)])),
    }


_SIGHTS: list[Call] = [
    *({"window": window, "causal": causal} for window in (0, 1, 4) for causal in (True, True, False)),
    *({"window": window, "chunked": True} for window in (1, 3, 4)),
]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(layouts())
def test_any_layout_agrees_with_the_oracle(call: Call) -> None:
    result = verdict(call)
    assert result.passed, result


def test_the_op_is_its_reference() -> None:
    call = sample("prefill")
    assert torch.equal(run(copied(call)), reference(**copied(call)))
