"""Finds the layers that keep a state of fixed size of each sequence: state spaces, linear attention, short convolution.

transformers keeps such states in the same cache as keys and values, and a layer reads and writes them through that
cache's methods. The model is run once on a few tokens with a cache that notes who calls these. So the layers are found
by what they do, in whatever model they occur.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from core.common.graphs.indexing import checked_indices
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.probe import function_bound, probe_tokens, relative_difference
from core.engine.inspect.recurrence import NONE, Accessor, Recurrence, RecurrentLayer, StateKey, StateSpec
from core.engine.models.forward import accepted_arguments, cache_name

_TOKENS = 8
"""Of the runs by which layers are found; half of them make the first chunk where chunks are compared."""


@dataclass(slots=True, eq=False)
class _Notes:
    #: The modules that run, the innermost last, with their arguments.
    running: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    #: Who asked for which state, and how it is given the cache.
    users: dict[StateKey, nn.Module] = field(default_factory=dict)
    given: dict[nn.Module, tuple[str, int]] = field(default_factory=dict)


@torch.no_grad()
@checked_indices()
def inspect_recurrence(model: Any) -> Recurrence:
    """Run the model on a few tokens and return its layers that keep states; raise `NotPageable` where they can't be
    served.

    The model's own attention runs, so its attention implementation may be any that takes a cache.
    """
    cache = _noting_cache(model)
    if cache is None:
        return NONE
    tokens = probe_tokens(model, _TOKENS)
    with _following(model, cache.notes):
        try:
            whole = _run(model, tokens, cache)
        except NotPageable:
            raise
        except Exception:  # it may refuse a cache that is not its own, whose states nobody else can hold
            return NONE
    layers = _layers(model, cache)
    if not layers:
        return NONE
    continues = _reads_states(model, tokens, layers) and _continues(model, tokens, whole)
    return Recurrence(layers=layers, continues=continues)


def _run(model: Any, tokens: list[int], cache: Any, first: int = 0) -> Tensor:
    """Return the logits of tokens at positions first, first + 1, …"""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    arguments: dict[str, Any] = {cache_name(model): cache, "use_cache": True, "return_dict": True}
    if "position_ids" in accepted_arguments(model):
        arguments["position_ids"] = torch.arange(first, first + len(tokens), device=ids.device)[None]
    logits: Tensor = model(input_ids=ids, **arguments).logits[0]
    return logits


def _continues(model: Any, tokens: list[int], whole: Tensor) -> bool:
    """Tell whether the model computes the same in two chunks as at once, by its own code on transformers' cache."""
    cache, half = _noting_cache(model), len(tokens) // 2
    try:
        parts = [_run(model, tokens[:half], cache).clone(), _run(model, tokens[half:], cache, half)]
    except Exception:  # a model's code may raise anything where it can't
        return False
    return relative_difference(torch.cat(parts), whole) <= function_bound(model)


def _reads_states(model: Any, tokens: list[int], layers: Mapping[nn.Module, RecurrentLayer]) -> bool:
    """Tell whether each layer, given several tokens, reads every kind of state that it left.

    By NaN in place of the states: what a dropped state changes may be less than half precision rounds.
    """
    kinds = {state.key[0] for layer in layers.values() for state in layer.states}
    try:
        return all(_spoilt(model, tokens, layers, kind) == _having(layers, kind) for kind in kinds)
    except Exception:  # a model's code may raise anything where it can't continue
        return False


def _having(layers: Mapping[nn.Module, RecurrentLayer], kind: str) -> set[nn.Module]:
    return {module for module, layer in layers.items() if any(state.key[0] == kind for state in layer.states)}


def _spoilt(model: Any, tokens: list[int], layers: Mapping[nn.Module, RecurrentLayer], kind: str) -> set[nn.Module]:
    """Return the layers whose second chunk is NaN where their states of a kind are; each is given numbers."""
    cache, half, found = _noting_cache(model), len(tokens) // 2, set[nn.Module]()
    _run(model, tokens[:half], cache)
    for module in _having(layers, kind):
        for state in layers[module].states:
            values = _state(cache, state.key)
            if state.key[0] == kind and values is not None:
                values.fill_(math.nan)

    def cure(module: nn.Module, _args: Any, output: Any) -> Any:
        if any(bool(each.isnan().any()) for each in tree_leaves(output) if isinstance(each, Tensor)):
            found.add(module)
        return tree_map_only(Tensor, torch.nan_to_num, output)

    handles = [module.register_forward_hook(cure) for module in layers]
    try:
        _run(model, tokens[half:], cache, half)
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def _following(model: nn.Module, notes: _Notes) -> Iterator[None]:
    """Within the block, `notes.running` holds the modules of the model that run."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        notes.running.append((module, args, kwargs))

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        notes.running.pop()

    handles: list[Any] = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module, cache: Any) -> dict[nn.Module, RecurrentLayer]:
    paths, notes = {module: path for path, module in model.named_modules()}, cache.notes
    states: dict[nn.Module, list[StateSpec]] = {}
    for key, module in notes.users.items():
        found = _state(cache, key)
        if found is not None:
            states.setdefault(module, []).append(StateSpec(key=key, shape=tuple(found.shape[1:]), dtype=found.dtype))
    return {
        module: RecurrentLayer(
            path=paths[module],
            argument=notes.given[module][0],
            place=notes.given[module][1],
            states=tuple(each),
            step_bounds=_step_bounds(module),
            accessors=cache.accessors,
        )
        for module, each in states.items()
    }


def _step_bounds(module: nn.Module) -> tuple[float, float]:
    """Return the bounds of a module's steps in prompts, by the name that transformers' state spaces give them."""
    least, most = getattr(module, "time_step_limit", (0.0, math.inf))
    return max(float(least), 0.0), 0.0 if math.isinf(most) else float(most)


def _state(cache: Any, key: StateKey) -> Tensor | None:
    kind, layer, number = key
    if cache.accessors:
        given = getattr(cache, cache.accessors[number][0])(layer)
        return given if isinstance(given, Tensor) else None
    states = cache.layers[layer].conv_states if kind == "conv" else cache.layers[layer].recurrent_states
    found: Tensor | None = states[number]
    return found


def _noting_cache(model: Any) -> Any:
    """Return an empty cache of the model's layers that notes who uses states; None where no layer has any."""
    try:
        own = _own_cache(model)
        cache = _noting_class()(config=model.config) if own is None else _noting_class(own, _accessors(own))()
    except Exception:  # transformers has no cache for it, or the model takes none
        return None
    return cache if cache.accessors or any(hasattr(layer, "recurrent_states") for layer in cache.layers) else None


def _own_cache(model: Any) -> Any:
    """Return the class of the cache that a model makes where it is given none, if the model brings that class."""
    from transformers import DynamicCache

    ids = torch.tensor([probe_tokens(model, 1)], device=next(model.parameters()).device)
    try:
        kind = type(model(input_ids=ids, use_cache=True, return_dict=True)[cache_name(model)])
    except Exception:  # a model's code may raise anything
        return None
    return kind if issubclass(kind, DynamicCache) and kind.__module__ == type(model).__module__ else None


def _accessors(kind: type) -> tuple[Accessor, ...]:
    """Return the pairs of methods of a model's own cache that read and write what a layer keeps: `get_` and `set_` of
    one name."""
    names = [name.removeprefix("set_") for name in vars(kind) if name.startswith("set_")]
    return tuple((f"get_{name}", f"set_{name}") for name in names if f"get_{name}" in vars(kind))


@functools.cache
def _noting_class(own: type | None = None, accessors: tuple[Accessor, ...] = ()) -> Any:
    """Return the class of caches that note who uses states: whoever updates them, or reads them by a method.

    transformers before 5.21 has no methods to read them: its layers read what they update, from `cache.layers`. own: of
    a cache that the model brings, made without arguments; accessors: its methods for states.
    """
    from transformers import DynamicCache

    base: Any = own or DynamicCache

    def noted(name: str, kind: Literal["conv", "recurrent"], number: int = 0) -> Any:
        original = getattr(base, name)
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names[1:], args, strict=False)) | kwargs
            _note(self, (kind, given["layer_idx"], given.get("state_idx", number)))
            return original(self, *args, **kwargs)

        return method

    def __init__(self: Any, **given: Any) -> None:
        base.__init__(self, **given)
        self.notes = _Notes()

    kinds: tuple[Literal["conv", "recurrent"], ...] = ("conv", "recurrent")
    methods = {f"{verb}_{kind}_state": kind for verb in ("get", "update") for kind in kinds}
    found = {name: noted(name, kind) for name, kind in methods.items() if hasattr(base, name)}
    for number, names in enumerate(accessors):
        found |= {name: noted(name, "recurrent", number) for name in names}
    return type("NotingCache", (base,), {"__init__": __init__, "accessors": accessors, **found})


def _note(cache: Any, key: StateKey) -> None:
    """Note the innermost module that runs as the user of a state."""
    notes: _Notes = cache.notes
    if not notes.running:
        return  # not followed
    module, args, kwargs = notes.running[-1]
    if notes.users.setdefault(key, module) is not module:
        raise NotPageable(f"two modules use the same {key[0]} state of layer {key[1]}")
    if module not in notes.given:
        notes.given[module] = _given(module, args, kwargs, cache)


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any) -> tuple[str, int]:
    """Return by which parameter a module is given the cache, and the place of that parameter."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if value is cache and name in names:
            return name, names.index(name)
    raise NotPageable(f"{type(module).__name__} keeps a state in a cache that its forward is not given")
