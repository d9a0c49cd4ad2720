"""Acme's kernels keep the whole contract of their canonical ops, and round in their own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.common.graphs.recorder import Recording
from core.common.ops.canonical import OPS
from core.common.ops.implementation import OpImplementation
from core.errors import UsageError
from torch import Tensor

from core_acme import attention, kernels, plugin
from core_acme.ops import DTYPES, IMPLEMENTATIONS

CPU = torch.device("cpu")
BY_NAME = {implementation.op.removeprefix("core::"): implementation for implementation in IMPLEMENTATIONS}
DECLARED = {op.name: op for op in OPS}


def refusal(name: str, call: dict[str, Any]) -> str | None:
    return BY_NAME[name].condition(DECLARED[name].bind((), call))


def sample(name: str, which: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return next(dict(s.kwargs) for s in DECLARED[name].samples(dtype, CPU) if s.name == which)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_every_sample_that_a_condition_takes_is_right(
    name: str, dtype: torch.dtype, fault_of: Callable[..., str]
) -> None:
    taken = 0
    for each in DECLARED[name].samples(dtype, CPU):
        if refusal(name, dict(each.kwargs)) is None:
            assert fault_of(name, BY_NAME[name].fn, each.kwargs) == "", each.name
            taken += 1
    assert taken >= 5


# The references of the other two compute in fp32 as well.
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("attention", "quantize")])
def test_half_precision_is_computed_wide_and_so_differs_from_the_reference(name: str) -> None:
    differ = 0
    for each in DECLARED[name].samples(torch.bfloat16, CPU):
        ours, theirs = (fn(**each.kwargs) for fn in (BY_NAME[name].fn, DECLARED[name].reference))
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        differ += any(not torch.equal(a, b) for a, b in pairs)
    assert differ > 0


@pytest.mark.parametrize(
    ("name", "which", "changes", "reason"),
    [
        ("rms_norm", "odd rows", {"x": torch.ones(2, 48, dtype=torch.float64)}, "x is torch.float64"),
        ("rms_norm", "odd rows", {"compute_dtype": torch.float64}, "computes in torch.float32"),
        ("rms_norm", "odd rows", {"compute_dtype": torch.bfloat16}, "computes in torch.float32"),
        ("rms_norm", "odd rows", {"out_dtype": torch.float64}, "out_dtype is torch.float64"),
        ("attention", "boolean mask", {}, "it has a mask"),
        ("attention", "codes, no scale", {}, "key_cache holds codes"),
        ("attention", "prefill", {"key_cache": torch.zeros(9, 2, 4, 16).mT.mT[:, :, ::2]}, "key_cache is not contig"),
        ("quantize", "int8, token", {"dtype": torch.float8_e5m2}, "none that the device has"),
    ],
)
def test_a_refusal_says_why(name: str, which: str, changes: dict[str, Any], reason: str) -> None:
    refused = refusal(name, sample(name, which) | changes)
    assert refused is not None and reason in refused


def test_a_mask_is_refused_by_the_kernel_too() -> None:
    with pytest.raises(UsageError, match=r"a mask of shape \(6, 1, "):
        attention.attention(**sample("attention", "boolean mask"))
    with pytest.raises(UsageError, match=r"a v_scale of shape \(\)"):
        attention.attention(**sample("attention", "prefill"), v_scale=torch.ones(()))


def test_narrow_rows_may_be_computed_wide() -> None:
    assert refusal("rms_norm", sample("rms_norm", "all in x's dtype", torch.bfloat16)) is None


@pytest.mark.parametrize(
    "name", ["prefill", "chunk and mixed", "window 3", "chunks of 3", "sinks", "soft-cap", "bidirectional"]
)
def test_attention_over_several_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch, fault_of: Callable[..., str]
) -> None:
    monkeypatch.setattr(attention, "CHUNK", 4)
    assert fault_of("attention", attention.attention, sample("attention", name)) == ""


@pytest.mark.parametrize("waste", [0, 100])
@pytest.mark.parametrize(
    "name", ["decode padded", "chunk and mixed", "window 3", "chunks of 5, decode", "bidirectional"]
)
def test_attention_by_token_and_by_sequence_reads_no_memory_that_nobody_wrote(
    name: str, waste: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MAX_WASTE", waste)
    clean = sample("attention", name)
    poisoned = {key: value.clone() if isinstance(value, Tensor) else value for key, value in clean.items()}
    used = torch.zeros(clean["key_cache"].shape[:2], dtype=torch.bool)
    for blocks, length in zip(clean["block_table"].tolist(), clean["seq_lens"].tolist(), strict=True):
        for position in range(length):
            used[blocks[position // 4], position % 4] = True
    for cache in ("key_cache", "value_cache"):
        poisoned[cache][~used] = torch.nan
    padding = int(clean["query_starts"][-1])
    for operand in ("query", "key", "value"):
        poisoned[operand][padding:] = torch.nan
    out = attention.attention(**poisoned)
    assert torch.equal(out, attention.attention(**clean))
    assert not out[padding:].any()


def test_attention_of_padding_alone_and_of_no_tokens() -> None:
    call = sample("attention", "decode padded")
    for name in ("seq_lens", "query_starts", "slot_mapping"):
        call[name] = torch.zeros_like(call[name])
    assert not attention.attention(**call).any()
    for name in ("query", "key", "value", "slot_mapping"):
        call[name] = call[name][:0]
    assert attention.attention(**call).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("op", "call"),
    [
        (kernels.rms_norm, sample("rms_norm", "slice of wider rows")),
        (kernels.add_rms_norm, sample("add_rms_norm", "odd rows")),
        (kernels.rotary, sample("rotary", "half, partial")),
        (kernels.quantize, sample("quantize", "int8, group")),
    ],
    ids=lambda value: value.name() if hasattr(value, "name") else "",
)
def test_opcheck_of_kernels_over_rows(op: Any, call: dict[str, Any], dtype: torch.dtype) -> None:
    torch.library.opcheck(op, *_split(op, _cast(call, dtype)))


@pytest.mark.parametrize("name", ["decode padded", "sinks"])
def test_opcheck_of_attention(name: str) -> None:
    call = sample("attention", name)
    last = (call.get("sinks"), call["scale"], 0, False, 0.0, True, call.get("max_query_len", 0))
    tensors = [call[a.name] for a in attention.PAGED_ATTENTION._schema.arguments[:9]]
    torch.library.opcheck(attention.PAGED_ATTENTION, (*tensors, *last))


def _cast(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


def _split(op: Any, call: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    rest = {name: value for name, value in call.items() if name not in positional}
    return tuple(call[name] for name in positional), rest


@pytest.mark.parametrize(("name", "which"), [("rms_norm", "odd rows"), ("rotary", "decode"), ("attention", "prefill")])
def test_a_kernel_is_one_call_on_a_tape(name: str, which: str) -> None:
    call = sample(name, which)
    before = {key: value.clone() for key, value in call.items() if isinstance(value, Tensor)}
    with torch.no_grad():
        recording = Recording()
        out = BY_NAME[name].fn(**call)
        tape = recording.finish()
        assert len(tape.calls) == 1
        assert all(torch.equal(call[key], value) for key, value in before.items()), "a capture writes nothing"
        tape.replay()
        again = {key: value.clone() for key, value in before.items()}
        expected = BY_NAME[name].fn(**call | again)
    for ours, theirs in zip(_tuple(out), _tuple(expected), strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(call[key], value) for key, value in again.items())


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_the_plugin_registers_them_under_its_own_names() -> None:
    found: tuple[OpImplementation, ...] = plugin.core_register_ops()
    assert [each.name for each in found] == [f"acme_{name}" for name in BY_NAME]
