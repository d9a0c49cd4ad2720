"""Modules in which `fuse_rotary_attention` must match, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_HEADS, _KV_HEADS, _SIZE, _PAGE = 4, 2, 16, 4
_LENS = ((3, 6), (2, 2))
"""New tokens and length of each sequence."""
_TABLE = ((2, 1), (3, 0))
"""Blocks of each sequence; block 0 belongs to none."""


class _Attention(nn.Module):
    """A rotation and an attention over a paged cache as the engine puts it in a model: heads first, then tokens."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, *, rotated: int = _SIZE, normed: bool = False, window: int = 0) -> None:
        super().__init__()
        self.rotated, self.window = rotated, window
        generator = torch.Generator().manual_seed(30)
        for name in ("key_cache", "value_cache"):
            shape = (1 + max(max(blocks) for blocks in _TABLE), _PAGE, _KV_HEADS, _SIZE)
            self.register_buffer(name, torch.randn(shape, generator=generator))
        names = ("query_weight", "key_weight") if normed else ()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.linspace(0.4, 1.8, _SIZE)) for name in names})

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *places: Tensor) -> Tensor:
        """Take query (1, T, H * D), key and value (1, T, K * D), cos and sin (1, T, D); give (T, H, D)."""
        heads = [x.view(1, x.shape[1], -1, _SIZE).transpose(1, 2) for x in (query, key, value)]
        tables = [table[..., : self.rotated].unsqueeze(1) for table in (cos, sin)]
        part = self.rotated % _SIZE
        if self.weights:
            own = (self.weights["query_weight"], self.weights["key_weight"])
            turned = torch.ops.core.qk_norm_rotary.default(*heads[:2], *own, *tables, 1e-6, rotary_dim=part)
        else:
            turned = torch.ops.core.rotary.default(*heads[:2], *tables, rotary_dim=part)
        rows = [x[0].transpose(0, 1) for x in (*turned, heads[2])]
        caches = (self.key_cache, self.value_cache)
        out: Tensor = torch.ops.core.attention.default(*rows, *caches, *places, scale=0.25, window=self.window)
        return out


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield a rotation of whole heads, one of a part of each in a window, and one of normed heads."""
    yield _Attention(), _inputs()
    yield _Attention(rotated=8, window=3), _inputs()
    yield _Attention(normed=True), _inputs()


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(31)
    num_tokens = sum(new for new, _ in _LENS)
    widths = (_HEADS * _SIZE, _KV_HEADS * _SIZE, _KV_HEADS * _SIZE)
    rows = [torch.randn(1, num_tokens, width, generator=generator) for width in widths]
    positions = [position for new, length in _LENS for position in range(length - new, length)]
    angles = torch.tensor(positions)[:, None] * 100.0 ** -torch.linspace(0, 1, _SIZE // 2)
    tables = [torch.cat((table, table), -1)[None] for table in (angles.cos(), angles.sin())]
    slots = [
        blocks[position // _PAGE] * _PAGE + position % _PAGE
        for blocks, (new, length) in zip(_TABLE, _LENS, strict=True)
        for position in range(length - new, length)
    ]
    starts = [0, *(sum(new for new, _ in _LENS[: index + 1]) for index in range(len(_LENS)))]
    lens = [length for _, length in _LENS]
    numbers = [torch.tensor(data, dtype=torch.int32) for data in (_TABLE, lens, starts)]
    return (*rows, *tables, numbers[0], torch.tensor(slots), *numbers[1:])
