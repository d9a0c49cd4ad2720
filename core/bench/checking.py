"""Checks that the subjects of a cell compute the same: compares tokens, and judges `core`'s logits by eager's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.bench.cells import Cell, Record
from core.common.numerics import judge_pooled
from core.engine.check.comparison import MAX_ORACLE_PARAMETERS
from core.engine.check.eager import fp64_logits
from core.engine.inspect.cache_codes import judge_rounded
from core.engine.inspect.probe import forward_logits, relative_difference
from core.engine.models.vocabulary import vocab_size_of
from core.quantization.layers import is_quantized

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.inspect.cache_codes import Rounding

_MAX_ROWS = 4
_NEAR_TIE = 4.0
"""A peer rounds elsewhere than eager: both logits of a near-tie may be off, each by more than eager's worst."""
_HOST_FLOPS = 2e11
"""An fp64 forward of more operations than this takes the host longer than a check should."""
_COPY_FACTOR = 1.3  # memory that a forward of the copy needs, over the copy's own bytes


def check(cell: Cell, records: Sequence[Record], model: Any, device: Device, rounding: Rounding | None = None) -> None:
    """Write into each record how its tokens, and its logits if they were kept, compare with eager's.

    Call when the subjects are closed: the reference may need the device's memory. model: transformers' own, eager.
    rounding: of the cache of `core`, where that holds codes; eager's never does.
    """
    fine = [record for record in records if not record.failure and record.tokens]
    yardstick = next((record for record in fine if record.subject == "eager"), next(iter(fine), None))
    if yardstick is None:
        return
    for record in fine:
        if record is not yardstick:
            record.verdict = {"against": yardstick.subject, **compare_tokens(cell, record.tokens, yardstick.tokens)}
            if record.logits is not None and yardstick.logits is not None:
                record.verdict |= _judge(cell, record, yardstick, model, device, rounding)
        if record.verdict.get("tokens_equal") is False:
            record.notes.append(f"tokens differ from {yardstick.subject}: {record.verdict['mismatch']}")
    for record in records:
        record.logits = None


def check_peers(cell: Cell, peers: Sequence[Record], own: Sequence[Record], model: Any, device: Device) -> None:
    """Write into each peer's record how its tokens compare with those of `core`, or else of eager.

    A peer may take another token only where the model itself hardly prefers one: where two logits lie so close that the
    rounding of the dtype decides. Any other token is wrong, and a peer that computes something else is no peer: its
    record then has that as failure. Of a quantised model peers hold other weights, so tokens that agree are counted,
    a note says how many, and no token is wrong. own: the records of `core` and transformers. model: as for `check`.
    """
    fine = [record for record in own if not record.failure and record.tokens]
    yardstick = next((record for record in fine if record.subject == "core"), next(iter(fine), None))
    for record in peers:
        if yardstick is None or record.failure or not record.tokens:
            continue
        if record.weights_drawn:
            record.notes.append("weights drawn by itself: tokens not compared")
            continue
        record.verdict = {"against": yardstick.subject, **compare_tokens(cell, record.tokens, yardstick.tokens)}
        if record.verdict["tokens_equal"]:
            continue
        wrong, how = "", "not judged: a peer holds other codes"
        if not is_quantized(model):
            wrong, how = _wrong_token(cell, record, yardstick, model, device)
        record.verdict["differences"] = how
        if wrong:
            record.failure = f"computes something else: {wrong}"
        else:
            equal = f"{record.verdict['tokens_agreeing']} of {record.verdict['tokens_compared']} equal"
            first = record.verdict["mismatch"]
            record.notes.append(f"tokens differ from {yardstick.subject}: {equal}; {first} ({how})")


def _wrong_token(cell: Cell, record: Record, yardstick: Record, model: Any, device: Device) -> tuple[str, str]:
    """Judge the first token of each sequence that differs; return what is wrong, or "", and how that was judged."""
    firsts = _first_differences(cell, record.tokens, yardstick.tokens)[:_MAX_ROWS]
    prompts = cell.prompts(vocab_size_of(model))
    contexts = [[*prompts[row], *record.tokens[row][:at]] for row, at in firsts]
    references, how = reference_logits(model, contexts, device)
    if not references:
        return "", f"not judged: {how}"
    for (row, at), context, reference in zip(firsts, contexts, references, strict=True):
        token = record.tokens[row][at]
        if not 0 <= token < len(reference):
            return f"sequence {row}, token {at}: {token}, which the vocabulary does not have", "wrong"
        eager = forward_logits(model, context)[-1].to("cpu", torch.float64)
        error, below = float((eager - reference).abs().max()), float(reference.max() - reference[token])
        if below > _NEAR_TIE * error:
            return (
                f"sequence {row}, token {at}: {token}, whose logit is {below:.3g} below the best; eager itself is "
                f"{error:.3g} off ({how})"
            ), "wrong"
    return "", f"near-ties by {how}"


def _first_differences(
    cell: Cell, tokens: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Return (sequence, position) of the first token of each sequence that differs, of those that are compared."""
    pairs = (
        (row, next((at for at, (a, b) in enumerate(zip(*both, strict=False)) if a != b), None))
        for row, both in enumerate(zip(_compared(cell, tokens), _compared(cell, other), strict=True))
    )
    return [(row, at) for row, at in pairs if at is not None]


def _compared(cell: Cell, tokens: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    most = 1 if cell.phase == "prefill" else 2 + cell.steps
    return [row[:most] for row in tokens]


def compare_tokens(cell: Cell, tokens: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare the tokens of the warm-up and of the first round.

    Later tokens are not compared: subjects share the static cache, so one subject's difference may reach another.
    """
    compared, agreeing, first, num_equal = 0, 0, "", 0
    for index, (ours, theirs) in enumerate(zip(_compared(cell, tokens), _compared(cell, other), strict=True)):
        pairs = list(zip(ours, theirs, strict=False))
        compared += len(pairs)
        agreeing += sum(a == b for a, b in pairs)
        at = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
        num_equal += at is None
        if at is not None and not first:
            first = f"sequence {index}, token {at}: {pairs[at][0]}, not {pairs[at][1]}"
    return {
        "tokens_equal": not first,
        "tokens_compared": compared,
        "tokens_agreeing": agreeing,
        "sequences_equal": num_equal,
        "mismatch": first,
    }


def _judge(
    cell: Cell, record: Record, yardstick: Record, model: Any, device: Device, rounding: Rounding | None
) -> dict[str, Any]:
    """Compare the logits that follow equal tokens: their difference, and the verdict of T1 on some of them."""
    assert record.logits is not None and yardstick.logits is not None
    history = 0 if cell.phase == "prefill" else 1
    rows = [
        (at, sequence)
        for at, sequence in enumerate(record.logit_rows)
        if record.tokens[sequence][:history] == yardstick.tokens[sequence][:history]
    ]
    if not rows:
        return {"logits_skipped": "no sequence has equal tokens so far"}
    ours = record.logits[[at for at, _ in rows]]
    theirs = yardstick.logits[[sequence for _, sequence in rows]]
    found: dict[str, Any] = {"logits_difference": relative_difference(ours, theirs)}
    rows = rows[:_MAX_ROWS]
    prompts = cell.prompts(ours.shape[1])
    contexts = [[*prompts[sequence], *record.tokens[sequence][:history]] for _, sequence in rows]
    references, how = reference_logits(model, contexts, device)
    if not references:
        return {**found, "logits_skipped": how}
    both = list(ours[: len(rows)]), list(theirs[: len(rows)])
    if rounding is None:
        verdict = judge_pooled(*both, references)
    else:
        rounded, _ = reference_logits(model, contexts, device, rounding)
        verdict = judge_rounded(*both, references, rounded, rounding.dtype)
        how += ", of the cache's codes"
    return {**found, "logits": {"reference": how, "rows": len(rows), **verdict.to_json()}}


def reference_logits(
    model: Any, contexts: Sequence[Sequence[int]], device: Device, rounding: Rounding | None = None
) -> tuple[list[Tensor], str]:
    """Return fp64 tensors (vocabulary,) of the logits after each context, and how they were computed.

    They are computed in fp64 on the host where that is quick, and in fp32 on the device for weights of half precision,
    whose rounding is thousands of times larger. Otherwise the list is empty and the text says why.
    rounding: of keys and values; None for none.
    """
    parameters = list(model.parameters())
    count, dtype = sum(p.numel() for p in parameters), parameters[0].dtype
    num_tokens = sum(map(len, contexts))
    if count <= MAX_ORACLE_PARAMETERS and 2 * count * num_tokens <= _HOST_FLOPS:
        caching = None if rounding is None else rounding.caching
        logits = fp64_logits(model, contexts, [[0]] * len(contexts), model.config._attn_implementation, caching)
        return [rows[0] for rows in logits], "fp64 on the host"
    if dtype.itemsize >= 4:
        return [], f"no fp64 reference for {count / 1e9:.1f} billion parameters and {num_tokens} tokens"
    memory = device.parts.memory()
    needed, free = 4 * count * _COPY_FACTOR, memory.total_bytes - memory.used_bytes
    if needed > free:
        return [], f"no fp32 reference: it takes {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
    return _fp32_logits(model, contexts, rounding), "fp32 on the device"


@torch.no_grad()
def _fp32_logits(model: Any, contexts: Sequence[Sequence[int]], rounding: Rounding | None) -> list[Tensor]:
    memo: dict[int, Any] = {id(p): nn.Parameter(_wide(p), requires_grad=False) for p in model.parameters()}
    memo |= {id(b): b.float() if b.dtype.is_floating_point else b.clone() for b in model.buffers()}
    wide = copy.deepcopy(model, memo)
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")  # others use half-precision grouped products
    caching = None if rounding is None else rounding.caching
    return [forward_logits(wide, context, caching)[-1].to("cpu", torch.float64) for context in contexts]


def _wide(parameter: Tensor) -> Tensor:
    """Return a copy in fp32; as it is for codes, whose dtype says what they mean."""
    is_code = parameter.dtype.itemsize == 1 or not parameter.is_floating_point()
    return parameter.detach().clone() if is_code else parameter.detach().float()
