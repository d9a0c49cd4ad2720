"""Small models without a model library that the tests of quantisation share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Three layers that are given the very same tensor, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(64, 64, bias=name == "q_proj"))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.q_proj(x) * torch.sigmoid(self.k_proj(x)) + self.v_proj(x)
        return self.o_proj(mixed)  # type: ignore[no-any-return]


class Model(nn.Module):
    """An embedding, two blocks with a router, an output head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.gate = nn.Linear(64, 4)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(nn.functional.rms_norm(x, (64,)))
        return self.lm_head(x) + self.gate(x).sum()  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().to(dtype).eval().requires_grad_(False)


def ids(rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (rows, 9), generator=torch.Generator().manual_seed(seed))


def relative(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact.double()).norm() / exact.double().norm())
