"""Python state that a model keeps between calls, watched around a trace.

A trace turns what a forward computes into a graph, but what it assigns (`self.state = …`, `self.calls += 1`) happens
once, while tracing, and would never happen again. Such a model must be refused, and given back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_REGISTRIES = ("_buffers", "_parameters", "_modules")
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Change:
    """One attribute that differs from the snapshot. place: `layers.0.cache` for the reader."""

    place: str
    before: Any
    after: Any


class Snapshot:
    """The attributes of every module that a callable reaches: tensors by identity, containers one level deep."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._saved = [
            (name, owner, {key: (value, _content(value)) for key, value in vars(owner).items()})
            for name, owner in _owners(model)
        ]

    def changes(self) -> list[Change]:
        """Return what differs now, assigned, removed or changed inside a container."""
        return [change for name, owner, saved in self._saved for change in _differences(name, owner, saved)]

    def restore(self) -> None:
        """Give every owner its attributes back, containers with the content they had."""
        for _, owner, saved in self._saved:
            current = vars(owner)
            for key in current.keys() - saved.keys():
                del current[key]
            for key, (value, content) in saved.items():
                current[key] = value
                if isinstance(value, dict):
                    value.clear()
                    value.update(content)
                elif isinstance(value, list):
                    value[:] = content


def model_tensors(model: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every parameter and buffer that a callable reaches."""
    for name, module in _owners(model):
        for registry in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, registry).items():
                if tensor is not None:
                    yield ".".join(part for part in (name, key) if part), tensor


def _owners(model: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, module) for the model, or for what a function closes over or a callable object holds."""
    seen: set[int] = set()
    for root in _roots(model):
        for name, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module


def _roots(model: Any) -> Iterator[nn.Module]:
    if isinstance(model, nn.Module):
        yield model
        return
    held = [cell.cell_contents for cell in getattr(model, "__closure__", None) or () if _filled(cell)]
    held += [getattr(model, "__self__", None), *getattr(model, "__dict__", {}).values()]
    yield from (item for item in held if isinstance(item, nn.Module))


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list) else None


def _differences(name: str, owner: Any, saved: dict[str, tuple[Any, Any]]) -> Iterator[Change]:
    current = vars(owner)
    for key in current.keys() | saved.keys():
        before, content = saved.get(key, (None, None))
        after = current.get(key)
        place = ".".join(part for part in (name, key) if part)
        if after is not before:
            if not (isinstance(before, _PLAIN) and isinstance(after, _PLAIN) and before == after):
                yield Change(place, before, after)
        elif isinstance(before, dict):
            for entry in before.keys() | content.keys():
                if before.get(entry) is not content.get(entry):
                    # `_buffers["state"]` is the attribute `state` to whoever wrote the model.
                    inner = f"{name}.{entry}".lstrip(".") if key in _REGISTRIES else f"{place}[{entry!r}]"
                    yield Change(inner, content.get(entry), before.get(entry))
        elif isinstance(before, list) and [id(x) for x in before] != [id(x) for x in content]:
            yield Change(place, content, before)
