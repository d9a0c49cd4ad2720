"""What processes compute that share a quantised model, in one process.

Each process quantises the inputs that it has by scales of its own. Where scales are those of the values at hand, codes
differ from those of a whole layer: by less than a step, since no part is wider than the whole, and by more than any
order of sums explains. So what judges a model in parts quantises in parts too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from core.engine.models.sharding.plan import ExpertCut, plan_of
from core.engine.models.sharding.shard import cut_modules
from core.quantization.layers import CodedLinear, QuantizedModule
from core.quantization.quantize import replace_module


class SummedParts(nn.Module):
    """A quantised layer as processes have it, each a part; their results are summed in the order of ranks."""

    def __init__(self, parts: list[nn.Module], *, cuts_input: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._cuts_input = cuts_input

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """Return what the layer gives for x, of which each part gets its own columns if the layer's inputs are cut."""
        xs = x.chunk(len(self.parts), -1) if self._cuts_input else [x] * len(self.parts)
        found: list[Tensor] = [part(own, *args) for part, own in zip(self.parts, xs, strict=True)]
        total = found[0]
        for each in found[1:]:
            total = total + each
        return total


def quantize_in_parts(model: nn.Module, num_processes: int, experts: ExpertCut = "width") -> nn.Module:
    """Let a whole model quantise its inputs as `num_processes` processes do that share it, in place, and return it.

    experts: as of `planned`. Layers whose input scales are calibrated, or that quantise no inputs, stay as they are.
    Raises `UsageError` as `shard_model` does.
    """
    if not any(map(_quantises_what_comes, model.modules())):
        return model  # whether its codes could be cut does not matter: parts may have been quantised after the cut
    names = {id(module): name for name, module in model.named_modules()}
    for module, parts in cut_modules(
        model, plan_of(model, num_processes, experts), num_processes, _quantises_what_comes
    ):
        replace_module(model, names[id(module)], SummedParts(parts, cuts_input=isinstance(module, CodedLinear)))
    return model


def _quantises_what_comes(module: nn.Module) -> bool:
    if not isinstance(module, QuantizedModule):
        return False
    activations = module.scheme.activations
    return activations is not None and activations.dynamic
