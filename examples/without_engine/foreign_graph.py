"""A graph from elsewhere: an `fx.GraphModule` in, a captured callable out, with core's passes in between.

python examples/without_engine/foreign_graph.py --device cpu
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, fx, nn

import core


class Block(nn.Module):
    """RMSNorm spelt out, and a gated projection."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        gate, up = self.up(normed).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


def main(device: str | core.Device = "auto") -> dict[str, Any]:
    """Compile a graph that torch.fx traced, run it at two sizes, and return what the passes found in it."""
    device = core.select_device(device) if isinstance(device, str) else device
    torch.manual_seed(2)
    graph: fx.GraphModule = fx.symbolic_trace(Block().eval().to(device.torch_device))
    inputs = {"x": core.InputSpec(("tokens", 32), torch.float32)}
    with core.compile(graph, device, inputs=inputs, buckets=[4, 16]) as program:
        differences = []
        for count in (3, 4, 11):
            x = torch.randn(count, 32, device=device.torch_device)
            with torch.no_grad():
                differences.append(float((program(x=x) - graph(x)).abs().max()))
        report = program.report()
        matched = {each.name: each.matched for each in report.traces[0].passes if each.matched}
        return {"matched": matched, "differences": differences, "fallbacks": dict(report.fallbacks)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    print(main(parser.parse_args().device))
