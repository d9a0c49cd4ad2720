"""A hand-written model with its own cache: two phases, token and sequence buckets, the cache bound as it is.

python examples/without_engine/hand_written.py --device cpu
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import core

VOCABULARY, WIDTH, CONTEXT, BATCH = 64, 32, 32, 4


class Model(nn.Module):
    """One attention layer over a cache that the caller owns; returns the most likely next token of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.head.weight)  # logits far apart, so that tokens vary
        nn.init.normal_(self.value.weight)

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor, cache: Tensor, want: str = "token") -> Tensor:
        """tokens, positions, rows: (tokens,), the cache row of each token's sequence. cache: (2, BATCH + 1, CONTEXT,
        WIDTH), written in place; the last row is where padding goes. want: "token", or "logits"."""
        x = self.embedding(tokens)
        cache[0].index_put_((rows, positions), self.key(x))
        cache[1].index_put_((rows, positions), self.value(x))
        scores = torch.einsum("td,tcd->tc", self.query(x), cache[0][rows]) / WIDTH**0.5
        visible = torch.arange(CONTEXT, device=tokens.device)[None] <= positions[:, None]
        weights = torch.softmax(scores.masked_fill(~visible, -1e4), -1)
        logits = self.head(torch.einsum("tc,tcd->td", weights, cache[1][rows]))
        return logits.argmax(-1) if want == "token" else logits


def build(model: Model, cache: Tensor, device: core.Device) -> core.Program:
    """Compile decode for 1 to BATCH sequences and prefill for up to CONTEXT tokens; prefill also with its logits."""
    token = core.InputSpec(("tokens",), torch.int64)
    return core.compile(
        model,
        device,
        inputs={
            "tokens": token,
            "positions": token,
            "rows": core.InputSpec(("tokens",), torch.int64, padding="sentinel", value=BATCH),
            "cache": core.InputSpec(tuple(cache.shape), cache.dtype, padding="bound"),
        },
        buckets={"decode": [1, 2, BATCH], "prefill": [8, CONTEXT]},
        options=core.CompileOptions(
            bound={"cache": cache},
            guards={"decode": {"want": ("token",)}, "prefill": {"want": ("token", "logits")}},
            reset=cache.zero_,
        ),
    )


def generate(program: core.Program, prompts: list[list[int]], num_tokens: int, device: torch.device) -> list[list[int]]:
    """Prefill each prompt, then decode all together."""

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    generated: list[list[int]] = []
    with program.serving():
        for row, prompt in enumerate(prompts):
            inputs = {"positions": list(range(len(prompt))), "rows": [row] * len(prompt), "tokens": prompt}
            tokens = program(
                "prefill", guards={"want": "token"}, **{name: tensor(values) for name, values in inputs.items()}
            )
            generated.append([int(tokens[-1])])
        for step in range(num_tokens - 1):
            tokens = program(
                "decode",
                guards={"want": "token"},
                tokens=tensor([each[-1] for each in generated]),
                positions=tensor([len(prompt) + step for prompt in prompts]),
                rows=tensor(list(range(len(prompts)))),
            )
            for each, token in zip(generated, tokens.tolist(), strict=True):
                each.append(token)
    return generated


def main(device: str | core.Device = "auto", num_tokens: int = 12) -> dict[str, Any]:
    """Generate through the program and, token by token, with the model itself; return both."""
    device = core.select_device(device) if isinstance(device, str) else device
    torch.manual_seed(1)
    model = Model().eval().to(device.torch_device)
    cache = torch.zeros(2, BATCH + 1, CONTEXT, WIDTH, device=device.torch_device)
    prompts = [[3, 14, 15], [9, 26, 5, 35, 8], [9, 7]]
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            tokens, own = list(prompt), torch.zeros_like(cache)
            for position in range(len(prompt) + num_tokens - 1):
                at = [torch.tensor([v], device=device.torch_device) for v in (tokens[position], position, 0)]
                token = int(model(*at, own))
                tokens += [token] if position >= len(prompt) - 1 else []
            expected.append(tokens[len(prompt) :])
    with build(model, cache, device) as program:
        tokens = generate(program, prompts, num_tokens, device.torch_device)
        return {"tokens": tokens, "expected": expected, "equal": tokens == expected, "report": program.report()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    result = main(parser.parse_args().device)
    print(result["report"])
    print(result["tokens"], "equal to the model itself:", result["equal"])
