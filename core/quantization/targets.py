"""Which layers of a model are quantised, and which are left out and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from core.errors import UsageError
from core.quantization.layers import QuantizedModule

DEFAULT_IGNORE = ("re:.*lm_head$", r"re:(.*\.)?(\w*router\w*|gate|\w*_gate)(\..*)?$")
"""Output head and routers: small, and everything later depends on their choices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored:
    """A layer that keeps its weights as they are."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Layers to quantise, by module path in the model's order, and those left out."""

    layers: dict[str, nn.Module]
    ignored: tuple[Ignored, ...]


def matches(pattern: str, name: str, kind: str = "") -> bool:
    """Tell whether a pattern means the module at path name of class kind, as in compressed-tensors.

    A pattern is a path, the name of a class, or "re:" and a regular expression for the beginning of a path. Raises
    `UsageError` for an invalid expression.
    """
    if not pattern.startswith("re:"):
        return pattern in (name, kind)
    try:
        return re.match(pattern[3:], name) is not None
    except re.error as error:
        raise UsageError(
            f"layers {pattern!r}", found=f"no regular expression: {error}", remedy="correct what stands behind 're:'"
        ) from None


def check_not_quantized(model: nn.Module) -> None:
    """Raise `UsageError` where a layer of the model is quantised already."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            raise UsageError(
                f"quantise a {type(model).__name__}",
                found=f"its layer {name!r} is quantised already ({module.scheme.name})",
                remedy="quantise the model that was loaded, once",
            )


def find_targets(model: nn.Module, ignore: Sequence[str]) -> Targets:
    """Return the linear layers and stacked experts of a model; raise `UsageError` where a pattern of ignore is unused.

    Left out: what ignore names, the output head, routers, weights shared with an embedding, and subclasses of
    `torch.nn.Linear` and single layers with a forward of their own.
    """
    layers: dict[str, nn.Module] = {}
    ignored: list[Ignored] = []
    head = _output_head(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    used: set[str] = set()
    for name, module in _candidates(model):
        pattern = next((p for p in (*ignore, *DEFAULT_IGNORE) if matches(p, name, type(module).__name__)), None)
        used |= {pattern} if pattern is not None else set()
        if pattern is not None:
            reason = f"ignored by {pattern!r}"
        elif module is head:
            reason = "the output head"
        elif isinstance(module, nn.Linear) and id(module.weight) in embeddings:
            reason = "its weight is an embedding's too"
        elif "forward" in vars(module) or (
            isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        ):
            reason = f"{type(module).__name__} computes more than a linear layer"
        else:
            layers[name] = module
            continue
        ignored.append(Ignored(name=name, reason=reason))
    unused = [pattern for pattern in ignore if pattern not in used]
    if unused:
        raise UsageError(
            f"quantise a {type(model).__name__}, ignoring {unused[0]!r}",
            found="no linear layer has that path",
            remedy="name a module path such as 'model.layers.0.mlp.down_proj', or 're:' and a regular expression",
        )
    return Targets(layers=layers, ignored=tuple(ignored))


def expert_weights(module: Any) -> tuple[str, str] | None:
    """Return the names of the stacked weights of a mixture's experts, as transformers has them; None for no experts.

    The first is of gate and up, or of up alone where the module says that its experts have no gate.
    """
    gated = getattr(module, "has_gate", True)
    names = ("gate_up_proj" if gated else "up_proj", "down_proj")
    parameters = [getattr(module, name, None) for name in names]
    return names if all(isinstance(p, nn.Parameter) and p.dim() == 3 for p in parameters) else None


def is_experts(module: nn.Module) -> bool:
    """Tell whether a module holds the stacked weights of a mixture's experts."""
    return expert_weights(module) is not None


def is_router(name: str, module: nn.Module) -> bool:
    """Tell whether the module at path name chooses experts by a weight (E, K)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and matches(DEFAULT_IGNORE[1], name)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name and (isinstance(module, nn.Linear) or is_experts(module)):
            yield name, module


def _output_head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None
