"""A plain callable, captured with no tracing; one function of it runs eagerly between two graphs.

python examples/without_engine/plain_callable.py --device cpu
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import core


@core.eager_break
def sort_by_length(x: Tensor) -> Tensor:
    """Order the rows by their norm, on the host: no graph may contain that."""
    order = sorted(range(len(x)), key=x.norm(dim=-1).tolist().__getitem__)
    return x[torch.tensor(order, dtype=torch.int64, device=x.device)]


def main(device: str | core.Device = "auto") -> dict[str, Any]:
    """Capture a function that reads the host in the middle, and compare it with itself."""
    device = core.select_device(device) if isinstance(device, str) else device
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3)).to(device.torch_device)

    def function(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(x @ weight) * scale
        ordered = sort_by_length(hidden)
        return ordered @ weight, ordered.sum(-1)

    inputs = {"x": core.InputSpec((8, 16), torch.float32), "scale": core.InputSpec((16,), torch.float32)}
    with core.capture(function, device, inputs=inputs) as program:
        equal = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            given = {name: torch.randn(spec.shape, generator=generator) for name, spec in inputs.items()}
            given = {name: tensor.to(device.torch_device) for name, tensor in given.items()}
            equal.append(all(torch.equal(a, b) for a, b in zip(program(**given), function(**given), strict=True)))
        (key,) = program.keys
        return {"equal": all(equal), "source": program.source(key), "modes": program.report().modes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    for name, value in main(parser.parse_args().device).items():
        print(name, value, sep=": ")
