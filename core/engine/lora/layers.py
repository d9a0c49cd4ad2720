"""Linear layers with room for adapters beside their weight, in memory that captured graphs may hold.

All adapters of a layer stand side by side in one A and one B, and `core::add_lora` adds to each token's result what its
own gives. So any device runs it, and an adapter is loaded by writing values.

Legend of shapes: T tokens of a step, K slots for adapters, R rank that each has room for, I and O sizes of a layer's
input and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import core.common.ops.linear  # noqa: F401  # registers core::add_lora
from core.common.graphs.indexing import checked_indices
from core.engine.inspect.attention import SIZE, NotPageable, implementation, register_interfaces
from core.engine.models.forward import accepted_arguments
from core.engine.models.hf import import_transformers
from core.quantization.layers import QuantizedLinear, WeightOnlyLinear

_LAYER = "_core_lora"
_NUM_TOKENS = 17
"""Of the step by which layers are found: enough that a layer for some of the tokens does not see all of them."""


@dataclass(slots=True)
class AdapterStep:
    """The slot of each token of the step that runs, (T,) int64; None where no token has an adapter."""

    slots: Tensor | None = None


@dataclass(slots=True, eq=False)
class AdaptedLayer:
    """The adapters of one linear layer, in the dtype of its input."""

    #: (K * R, I): A of each adapter.
    a: Tensor
    #: (O, K * R): B of each adapter, times its scale.
    b: Tensor
    #: R.
    rank: int
    #: The step being run, shared by all layers.
    step: AdapterStep

    def __deepcopy__(self, memo: object) -> AdaptedLayer:
        """Stay with the original: a copied model must not duplicate the adapters."""
        return self

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the layer's output (…, T, O) for x (…, T, I) with what the tokens' adapters add."""
        if self.step.slots is None:
            return out
        # The canonical op at once: there is nothing to lift, and no pass takes A for a weight to join with the layer's.
        added: Tensor = torch.ops.core.add_lora.default(
            out, x, self.a, self.b, self.step.slots, rank=self.rank, sizes=[out.shape[-1]]
        )
        return added


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A linear layer that adapters may have."""

    #: I and O.
    size_in: int
    size_out: int
    #: Of the input.
    dtype: torch.dtype
    #: Layers that read one tensor, such as query, key and value, have one number.
    group: int


@checked_indices()
def find_layers(model: Any) -> dict[str, FoundLayer]:
    """Return the linear layers that adapters may have, by path and in the order in which they run.

    They are those that a forward runs once, over all of its tokens, and that give one row of O numbers for each of
    them: not the output layer, nor layers of a head that gets the last tokens alone, nor experts of their own, nor
    routers, which choose.
    """
    sizes = {module: found for module in model.modules() if (found := _sizes(module)) is not None}
    sizes.pop(model.get_output_embeddings(), None)
    #: For each run the input; None where it was not over all tokens, or where more than rows came out.
    runs: dict[nn.Module, list[Tensor | None]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(out, Tensor)
        rows = args[0].shape[:-1] if plain else torch.Size()
        plain = plain and out.shape == (*rows, sizes[module][1]) and rows.numel() == _NUM_TOKENS == rows[-1]
        runs.setdefault(module, []).append(args[0] if plain else None)

    register_interfaces()
    ids = torch.arange(_NUM_TOKENS, device=next(model.parameters()).device)[None]
    tokens = ids % model.config.get_text_config().vocab_size
    kept = {"logits_to_keep": ids[0, -1:]} if "logits_to_keep" in accepted_arguments(model) else {}
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in sizes]
    try:
        with torch.no_grad(), implementation(model, SIZE):
            model(input_ids=tokens, position_ids=torch.zeros_like(ids), use_cache=False, **kept)
    except Exception as error:  # its code may raise anything, as where an indexer asks for a cache
        why = f"{type(error).__name__}: {error}"
        raise NotPageable(f"a forward without a cache, which tells its linear layers, fails: {why}") from error
    finally:
        for handle in handles:
            handle.remove()
    paths = {module: path for path, module in model.named_modules()}
    once = {module: each[0] for module, each in runs.items() if len(each) == 1}
    read = {module: x for module, x in once.items() if x is not None}
    groups = {number: group for group, number in enumerate(dict.fromkeys(map(id, read.values())))}
    return {paths[module]: FoundLayer(*sizes[module], x.dtype, groups[id(x)]) for module, x in read.items()}


def attach(model: nn.Module, layers: Mapping[str, AdaptedLayer]) -> None:
    """Give linear layers their adapters; by plain attributes, so that neither state dict nor `.to()` sees them."""
    for path, layer in layers.items():
        module = model.get_submodule(path)
        object.__setattr__(module, _LAYER, layer)
        object.__setattr__(module, "forward", MethodType(_forward, module))


def detach(model: nn.Module, layers: Iterable[str]) -> None:
    """Take the adapters of the layers at these paths away again."""
    for path in layers:
        module = model.get_submodule(path)
        for name in (_LAYER, "forward"):
            module.__dict__.pop(name, None)


def _forward(module: Any, x: Tensor) -> Tensor:
    layer: AdaptedLayer = module._core_lora
    return layer.add(x, type(module).forward(module, x))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return I and O of a linear layer, None for other modules."""
    if isinstance(module, nn.Linear | QuantizedLinear | WeightOnlyLinear):
        return module.in_features, module.out_features
    import_transformers()
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        size_in, size_out = module.weight.shape
        return int(size_in), int(size_out)
    return None
