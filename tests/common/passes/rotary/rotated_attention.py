"""Models of one rotation and one attention: in every form that fuses, and in some that must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.common.passes.rotary.attention_examples import examples

T, H, K, D = 5, 4, 2, 16
"""Tokens, heads, key/value heads, head size."""
CACHES = ("key_cache", "value_cache")
PLACES = (*CACHES, "block_table", "slot_mapping", "seq_lens", "query_starts")
Model = Callable[..., Any]


class Cached(nn.Module):
    """A model of a function that takes the caches too; a program writes into buffers only."""

    def __init__(self, function: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        owner, _ = next(examples())
        for name in CACHES:
            self.register_buffer(name, getattr(owner, name).to(dtype))

    def forward(self, **given: Tensor) -> Any:
        return self.function(**given, **dict(self.named_buffers()))


def inputs_of(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return query (1, 5, 4 * 16), key and value (1, 5, 2 * 16), cos and sin (1, 5, 16), and where the cache is."""
    _, tensors = next(examples())
    names = ("query", "key", "value", "cos", "sin", *PLACES[2:])
    found = dict(zip(names, tensors, strict=True))
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def heads(x: Tensor) -> Tensor:
    return x.view(1, x.shape[1], -1, D)


def turned(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Rotate query and key by cos and sin."""
    out: tuple[Tensor, Tensor] = torch.ops.core.rotary.default(*tensors, **options)
    return out


def attend(*given: Any, **options: Any) -> Tensor:
    """Attend with rows of query, key and value; last come the places of the cache, and its scales if it has any."""
    *rows, places = given
    own = [places[name] for name in PLACES]
    options |= {name: places[name] for name in ("k_scale", "v_scale") if name in places}
    out: Tensor = torch.ops.core.attention.default(*rows, *own, scale=0.25, **options)
    return out


def heads_first(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), cos.unsqueeze(1), sin.unsqueeze(1))
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places)


def made_first(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    """Rotate what is no transposition: heads first in memory too."""
    rotated = turned(*(heads(x).transpose(1, 2) * 2 for x in (query, key)), cos.unsqueeze(1), sin.unsqueeze(1))
    return attend(*(x.transpose(-3, -2).squeeze(0) for x in rotated), heads(value)[0], places)


def tokens_first(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    rotated = turned(*(heads(x) for x in (query, key)), cos.unsqueeze(2), sin.unsqueeze(2), style="interleaved")
    return attend(*(x[0] for x in rotated), heads(value)[0], places, window=3)


def rows_of_tokens(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    rotated = turned(*(heads(x)[0] for x in (query, key)), cos[0].unsqueeze(1), sin[0].unsqueeze(1))
    return attend(*rotated, heads(value)[0], places, softcap=2.0, sinks=cos[0, 0, :H])


def rows_of_heads(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    rotated = turned(*(heads(x)[0].transpose(0, 1) for x in (query, key)), cos, sin)
    return attend(*(x.transpose(0, 1) for x in rotated), heads(value)[0], places)


def plain_tables(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), cos[0, :, :8], sin[0, :, :8], rotary_dim=8)
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places)


def going_on_wide(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    tables = (cos.unsqueeze(1), sin.unsqueeze(1))
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), *tables, out_dtype=torch.float32)
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places)


FORMS: dict[str, Model] = {
    form.__name__: form
    for form in (heads_first, made_first, tokens_first, rows_of_tokens, rows_of_heads, plain_tables, going_on_wide)
}


def key_goes_on(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Any:
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), cos.unsqueeze(1), sin.unsqueeze(1))
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places), rotated[1].sum()


def table_per_head(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    scaled = [x.unsqueeze(1) * torch.tensor([1.0, 2.0])[None, :, None, None].to(x.dtype) for x in (cos, sin)]
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query[..., : K * D], key)), *scaled)
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places)


def one_angle(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    tables = (cos[:, :1].unsqueeze(1), sin[:, :1].unsqueeze(1))
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), *tables)
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places)


def masked(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), cos.unsqueeze(1), sin.unsqueeze(1))
    mask = torch.arange(8)[None, None].expand(T, 1, 8) % 3 != 1
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places, mask=mask)


def both_ways(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), cos.unsqueeze(1), sin.unsqueeze(1))
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places, causal=False)


def anothers_key(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Any:
    tables = (cos.unsqueeze(1), sin.unsqueeze(1))
    first = turned(*(heads(x).transpose(1, 2) for x in (query, key)), *tables)
    second = turned(*(heads(x).transpose(1, 2) for x in (query * 2, key + 1)), *tables)
    rows = [x[0].transpose(0, 1) for x in (second[0], first[1])]
    return attend(*rows, heads(value)[0], places), first[0].sum() + second[1].sum()


def query_alone(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Any:
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), cos.unsqueeze(1), sin.unsqueeze(1))
    return attend(rotated[0][0].transpose(0, 1), heads(key)[0], heads(value)[0], places), rotated[1].sum()


def written_between(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    tables = (cos.unsqueeze(1), sin.unsqueeze(1))
    rotated = turned(*(heads(x).transpose(1, 2) for x in (query, key)), *tables)
    places["key_cache"].mul_(2)
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places)


def of_more_sequences(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
    """Attend from the first of two sequences that are rotated together."""
    both = [torch.cat((x, x + 1)).view(2, T, -1, D).transpose(1, 2) for x in (query, key)]
    rotated = turned(*both, cos.unsqueeze(1), sin.unsqueeze(1))
    return attend(*(x[0].transpose(0, 1) for x in rotated), heads(value)[0], places)


NEAR_MISSES: dict[Model, str] = {
    key_goes_on: "the rotated key is used by sum",
    table_per_head: "is no row for each token",
    one_angle: "is no row for each token",
    masked: "has a mask",
    both_ways: "is not causal",
    anothers_key: "are rotated apart",
    query_alone: "only the query",
    written_between: "written in between",
    of_more_sequences: "not read as rows of tokens",
}
