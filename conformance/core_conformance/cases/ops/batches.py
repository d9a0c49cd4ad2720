"""What declares itself batch-invariant: a row's result is the same in every bit whatever other rows a call has.

Rows are computed alone, in batches of 1 to 64 and more, and at other places of a batch; tokens of attention by whole
prompts and by chunks of them, one sequence at a time and many together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpImplementation
from core.device import Device
from core.verify.fakes.memory import same_bits
from core_conformance.case import COMPILED_TIMEOUT_S, Case
from core_conformance.cases.ops.collect import candidates, judged_ops, slug
from core_conformance.dtypes import DTYPES, dtype_name, refused_dtype
from core_conformance.inputs.opcalls import calls, refusal
from core_conformance.rules.oracle import leaves
from core_conformance.trial import NotSupported, Trial

BATCHES = (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 130)
"""Numbers of rows, 1 to 64 and beyond: kernels change at powers of two, and at what fills their registers."""

ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("x",),
        "quantized_linear": ("x",),
        "weight_only_linear": ("x",),
        "rms_norm": ("x",),
        "layer_norm": ("x",),
        "add_rms_norm": ("x", "residual"),
        "gated_activation": ("gate", "up"),
        "gated_activation_fused": ("gate_up",),
        "add_lora": ("base", "x", "slots"),
        "moe_route": ("logits",),
        "grouped_mlp": ("x", "weights", "indices"),
        "argmax": ("logits",),
        "sample": ("logits", "sampling_params"),
    }
)
"""Ops whose results have one row for each row of these arguments, all dimensions but the last taken together."""

TOKENS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rotary": ("query", "key", "cos", "sin"),
        "rotary_single": ("x", "cos", "sin"),
        "rotary_table": ("positions",),
    }
)
"""Ops whose results have one entry of the first dimension for each of these arguments; calls in which these arguments
have other first dimensions are left out."""


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Return a case for each implementation that declares itself batch-invariant, in each dtype."""
    for op in judged_ops(device):
        for of in candidates(op, device).values():
            for dtype in DTYPES if of.batch_invariant else ():
                judge = judge_attention if op.name in ATTENTION else judge_rows
                yield Case(
                    id=f"ops/{op.name}/{slug(of.name)}/batches/{dtype_name(dtype)}",
                    what=f"core::{op.name}: {of.name!r} gives a row the same bits in any batch, as it declares",
                    run=partial(judge, op=op, of=of, dtype=dtype),
                    not_supported=refused_dtype(device, dtype),
                    timeout_s=COMPILED_TIMEOUT_S,
                )


def judge_rows(trial: Trial, *, op: CanonicalOp, of: OpImplementation, dtype: torch.dtype) -> None:
    """Compare each batch with the same rows of the largest, where the op's calls take it."""
    if of.missing:
        raise NotSupported(of.missing)
    if op.name not in {**ROWS, **TOKENS}:
        trial.fail("it declares itself batch-invariant, and the suite knows no batches of this op")
        return
    refused: dict[str, str] = {}
    judged = 0
    for sample in calls(op, dtype, trial.device.torch_device, trial.seed):
        if op.name in TOKENS and len({sample.kwargs[name].shape[0] for name in TOKENS[op.name]}) > 1:
            continue
        many = _widened(op, sample.kwargs, max(BATCHES))
        answers = {count: refusal(op, of.condition, _rows(op, many, 0, count)) for count in (1, 8, max(BATCHES))}
        if len({reason is None for reason in answers.values()}) > 1:
            trial.fail(f"{sample.name}: its condition depends on the number of rows: {answers}")
            continue
        if answers[1] is not None:
            refused.setdefault(answers[1], sample.name)
            continue
        judged += 1
        _compare_batches(trial, sample.name, op, of, many)
    if not judged and not trial.failures:
        raise NotSupported("; ".join(refused))


def _compare_batches(trial: Trial, name: str, op: CanonicalOp, of: OpImplementation, many: Mapping[str, Any]) -> None:
    whole = [each.clone() for each in _run(of, many)]
    for count in BATCHES:
        for first in {0, max(BATCHES) - count, min(3, max(BATCHES) - count)}:
            found = _run(of, _rows(op, many, first, count))
            expected = [each[first : first + count] for each in whole]
            if not all(map(same_bits, found, expected)):
                trial.fail(
                    f"{name}: rows {first} to {first + count - 1} alone differ from the same among {len(whole[0])}"
                )
                return


def _run(of: OpImplementation, kwargs: Mapping[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        results = leaves(of.fn(**{name: v.clone() if isinstance(v, Tensor) else v for name, v in kwargs.items()}))
    return [each for each in results if isinstance(each, Tensor)]


def _widened(op: CanonicalOp, kwargs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return a call with so many rows: those of the sample, scaled differently each time that they come again."""
    made = dict(kwargs)
    for name in {**ROWS, **TOKENS}[op.name]:
        x: Tensor = kwargs[name]
        if op.name in ROWS and (x.is_floating_point() or x.dim() > 1):  # else one number for each row
            x = x.reshape(-1, x.shape[-1])
        if not len(x):
            x = x.new_ones((1, *x.shape[1:]))
        times = -(-count // len(x))
        many = x.repeat(times, *(1 for _ in x.shape[1:]))
        if x.is_floating_point():
            factors = torch.linspace(0.5, 1.5, len(many), device=x.device).view(-1, *(1 for _ in x.shape[1:]))
            many = (many.float() * factors).to(x.dtype)
        made[name] = many[:count].contiguous()
    return made


def _rows(op: CanonicalOp, kwargs: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
    chosen = {name: kwargs[name][first : first + count] for name in {**ROWS, **TOKENS}[op.name]}
    return {**kwargs, **chosen}


Chunk = tuple[int, int, int]
"""A sequence, and its tokens of a step: from, to."""
PAGE, HEADS, KV_HEADS = 16, 4, 2
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": {},
        "window": {"window": 21},
        "chunks": {"window": 21, "chunked": True},
        "softcap and sinks": {"softcap": 20.0, "sinks": True},
    }
)

ATTENTION: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"attention": VARIANTS, "rotary_attention": {**VARIANTS, "normed": {"normalize": True, "eps": 1e-5}}}
)
"""Ops over sequences, and the variants that are judged of each."""


class _Sequences:
    """Queries, keys and values of sequences, each with its own blocks of a cache."""

    def __init__(self, trial: Trial, op: str, dtype: torch.dtype, size: int, variant: Mapping[str, Any]) -> None:
        generator = torch.Generator().manual_seed(trial.seed)
        self.device = trial.device.torch_device
        self.lengths = [1 + (37 * index) % 90 for index in range(62)] + [150, 333]

        def draw(heads: int) -> list[Tensor]:
            shape = (heads, size)
            drawn = (torch.randn((length, *shape), generator=generator) for length in self.lengths)
            return [each.to(self.device, dtype) for each in drawn]

        self.query, self.key, self.value = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
        widest = -(-max(self.lengths) // PAGE)
        self.table = torch.zeros((len(self.lengths), widest), dtype=torch.int32)
        first = 1
        for index, length in enumerate(self.lengths):
            num = -(-length // PAGE)
            self.table[index, :num] = torch.arange(first, first + num)
            first += num
        self.shape = (first, PAGE, KV_HEADS, size)
        sinks = torch.randn(HEADS, generator=generator).to(self.device, dtype) if variant.get("sinks") else None
        self.rest = {"scale": size**-0.5, **variant, "sinks": sinks}
        angles = torch.outer(torch.arange(max(self.lengths)), 100.0 ** -torch.linspace(0, 1, size // 2))
        turned = op == "rotary_attention"
        self.tables = [each.to(self.device, dtype) for each in (angles.cos(), angles.sin())] if turned else []
        self.caches = [torch.zeros(self.shape, dtype=dtype, device=self.device) for _ in range(2)]

    def call(self, step: Sequence[Chunk]) -> dict[str, Any]:
        """Return the arguments of a step."""
        tokens = [torch.cat([all_of[s][a:b] for s, a, b in step]) for all_of in (self.query, self.key, self.value)]
        slots = [int(self.table[s, p // PAGE]) * PAGE + p % PAGE for s, a, b in step for p in range(a, b)]
        at = torch.tensor([p for _, a, b in step for p in range(a, b)], device=self.device)
        starts = [0]
        for _, a, b in step:
            starts.append(starts[-1] + b - a)

        def numbers(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values, dtype=dtype, device=self.device)

        return {
            **dict(zip(("query", "key", "value"), tokens, strict=True)),
            **{name: table[at] for name, table in zip(("cos", "sin"), self.tables, strict=False)},
            "key_cache": self.caches[0],
            "value_cache": self.caches[1],
            "block_table": self.table[[s for s, _, _ in step]].to(self.device),
            "slot_mapping": numbers(slots, torch.int64),
            "seq_lens": numbers([b for _, _, b in step], torch.int32),
            "query_starts": numbers(starts, torch.int32),
            "max_query_len": max(b - a for _, a, b in step),
            **self.rest,
        }

    def run(self, of: OpImplementation, steps: Iterable[Sequence[Chunk]]) -> list[Tensor]:
        """Run steps on empty caches and return each sequence's results."""
        for cache in self.caches:
            cache.zero_()
        found: dict[int, list[Tensor]] = {index: [] for index in range(len(self.lengths))}
        for step in steps:
            with torch.no_grad():
                out = of.fn(**self.call(step))
            for (index, _, _), part in zip(step, out.split([b - a for _, a, b in step]), strict=True):
                found[index].append(part)
        return [torch.cat(parts) for parts in found.values()]


def judge_attention(trial: Trial, *, op: CanonicalOp, of: OpImplementation, dtype: torch.dtype) -> None:
    """Compare whole prompts, each alone, with batches of 2 to 64 sequences and with chunks down to single tokens."""
    if of.missing:
        raise NotSupported(of.missing)
    for name, variant in ATTENTION[op.name].items():
        for size in (16, 72):
            sequences = _Sequences(trial, op.name, dtype, size, variant)
            reason = refusal(op, of.condition, sequences.call([(0, 0, 1)]))
            if reason is not None:
                raise NotSupported(reason)
            alone = sequences.run(of, [[(i, 0, length)] for i, length in enumerate(sequences.lengths)])
            for how, steps in _plans(sequences.lengths):
                found = sequences.run(of, steps)
                pairs = zip(found, alone, sequences.lengths, strict=True)
                wrong = [length for one, other, length in pairs if not same_bits(one, other)]
                if wrong:
                    told = f"{len(wrong)} sequences differ, of lengths {wrong[:5]}, …"
                    trial.fail(f"{name}, head size {size}, {how}: {told}")


def _plans(lengths: Sequence[int]) -> Iterator[tuple[str, list[list[Chunk]]]]:
    for together in (2, 5, 64):
        groups = [range(i, min(i + together, len(lengths))) for i in range(0, len(lengths), together)]
        yield f"{together} together", [[(i, 0, lengths[i]) for i in group] for group in groups]
    for chunk in (1, 7, 64):
        steps = []
        for start in range(0, max(lengths), chunk):
            steps.append([(i, start, min(start + chunk, n)) for i, n in enumerate(lengths) if n > start])
        yield f"chunks of {chunk} tokens, all sequences together", steps
