"""The memory of an engine's adapters: slots of fixed addresses in every linear layer that may have one.

Legend of shapes: T tokens of a step, K slots, R rank that each has places for, I and O sizes of a layer's input and
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpImplementation
from core.compilation.capture.breaks import Held
from core.engine.lora.layers import AdaptedLayer, AdapterStep, FoundLayer, attach, detach, find_layers
from core.engine.lora.ranks import slot_rank
from core.errors import ModelError

NO_SLOT = 0
"""Of tokens without an adapter; the slots of adapters are numbered from 1."""
LayerTensors = tuple[Tensor, Tensor]
"""A (rank, I) and B (O, rank) of one layer, B times the adapter's scale."""


class AdapterMemory:
    """A and B of all slots, owned by the engine. An empty slot is zero, and so are places beyond an adapter's rank."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        max_loras: int,
        max_rank: int,
        implementations: Sequence[OpImplementation] = (),
    ) -> None:
        """Find the model's linear layers and take K * R * (I + O) numbers for each.

        implementations: the device's, for which R may be a few places more than `max_rank` (`slot_rank`). Raises
        `ModelError` where there is no room or no such layer.
        """
        asked = f"{max_loras} adapters of rank {max_rank} for a {type(model).__name__}"
        self._model = model
        self.max_loras, self.max_rank = max_loras, max_rank
        self._step = AdapterStep()
        found = find_layers(model)
        if not found:
            raise ModelError(asked, found="it has no linear layer that may have one", remedy="take max_loras=0")
        self._rank = rank = slot_rank(max_rank, found.values(), implementations, device)
        width = max_loras * rank
        try:
            with torch.inference_mode(False):  # tensors made in that mode can't be compiled
                self.layers = {
                    path: AdaptedLayer(a, b, rank, self._step) for path, a, b in _side_by_side(found, width, device)
                }
        except torch.OutOfMemoryError as error:
            num_bytes = sum(width * (each.size_in + each.size_out) * each.dtype.itemsize for each in found.values())
            raise ModelError(
                asked,
                found=f"{num_bytes / 2**30:.2f} GiB are needed: {' '.join(str(error).split())[:200]}",
                remedy="lower max_loras or max_lora_rank, or free memory of the device",
            ) from None

    @property
    def num_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(layer.a.nbytes + layer.b.nbytes for layer in self.layers.values())

    @contextmanager
    def attaching(self) -> Iterator[None]:
        """Let the model's linear layers add what adapters give, from now on.

        Within the block all slots hold some numbers: a compile that is checked on zeros is not checked.
        """
        tensors = [each for layer in self.layers.values() for each in (layer.a, layer.b)]
        with torch.no_grad():
            for each in tensors:
                each.view(-1).copy_(torch.arange(each.numel(), device=each.device).sin() * each.shape[1] ** -0.5)
        attach(self._model, self.layers)
        yield
        for each in tensors:
            each.zero_()

    def detach(self) -> None:
        """Leave the model's layers as they were; a second call does nothing."""
        detach(self._model, self.layers)

    @property
    def held(self) -> tuple[Held, ...]:
        """What is set for the time of a step."""
        return ((self._step, "slots"),)

    def begin_step(self, slots: Tensor) -> None:
        """Let the layers see which slot each token has, (T,) int64; `NO_SLOT` for none."""
        self._step.slots = slots

    def end_step(self) -> None:
        """Forget the step: until the next one, the layers are the model's own."""
        self._step.slots = None

    def check(self, asked: str, tensors: Mapping[str, LayerTensors]) -> None:
        """Raise `ModelError` for an adapter that does not fit the model or a slot. asked: the error's first line."""
        for path, (down, up) in tensors.items():
            layer = self.layers.get(path)
            if layer is None:
                names = sorted({each.rpartition(".")[2] for each in self.layers})
                near = get_close_matches(path, self.layers, n=1)
                found = f"the {type(self._model).__name__} has no layer {path!r} that may have adapters"
                remedy = f"take an adapter of {', '.join(names)}" + (f"; there is {near[0]!r}" if near else "")
                raise ModelError(asked, found=found, remedy=remedy)
            if len(down) > self.max_rank:
                found = f"{path!r} is of rank {len(down)}, and there is room for {self.max_rank}"
                raise ModelError(asked, found=found, remedy=f"make the engine with max_lora_rank={len(down)}")
            sizes, own = (down.shape[1], up.shape[0]), (layer.a.shape[1], layer.b.shape[0])
            if sizes != own:
                found = f"{path!r} takes {sizes[0]} numbers to {sizes[1]}, the model's layer {own[0]} to {own[1]}"
                raise ModelError(asked, found=found, remedy="take an adapter of this very model")
            if not all(bool(each.to(layer.a.dtype).isfinite().all()) for each in (down, up)):
                found = f"{path!r} holds NaN, infinity, or what is infinite as {layer.a.dtype}"
                raise ModelError(asked, found=found, remedy="copy the adapter again, or serve in a wider dtype")

    @torch.no_grad()
    def write(self, slot: int, tensors: Mapping[str, LayerTensors]) -> None:
        """Put an adapter into a slot, by the path of each layer; layers that it leaves out add nothing."""
        for path, layer in self.layers.items():
            a, b = self._views(layer, slot)
            a.zero_()
            b.zero_()
            if path in tensors:
                down, up = tensors[path]
                a[: down.shape[0]].copy_(down)
                b[:, : up.shape[1]].copy_(up)

    def _views(self, layer: AdaptedLayer, slot: int) -> tuple[Tensor, Tensor]:
        places = slice((slot - 1) * self._rank, slot * self._rank)
        return layer.a[places], layer.b[:, places]


def _side_by_side(
    found: Mapping[str, FoundLayer], width: int, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield path, A (width, I) and B (O, width) of each layer, in zeros.

    Those of layers that read one tensor lie end to end, as a pass that merges such layers wants them: it then moves
    nothing, and a start finds what an earlier one has compiled.
    """
    for key in dict.fromkeys((each.group, each.dtype) for each in found.values()):
        group = {path: each for path, each in found.items() if (each.group, each.dtype) == key}
        sizes = [each.size_out for each in group.values()]
        size_in, dtype = next(iter(group.values())).size_in, key[1]
        downs = torch.zeros((len(group) * width, size_in), dtype=dtype, device=device).split(width)
        ups = torch.zeros((sum(sizes), width), dtype=dtype, device=device).split(sizes)
        yield from zip(group, downs, ups, strict=True)
