"""The adapters that an engine has loaded, by name: read from PEFT's folders, and each in a slot of the memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from core.engine.lora.memory import NO_SLOT, AdapterMemory
from core.engine.lora.stated import WEIGHTS_NAME, AdapterConfig, asked_for, read_stated
from core.engine.models.weights_header import read_header
from core.errors import ModelError, UsageError

_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_loads = count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter that is loaded."""

    name: str
    path: Path
    #: The largest rank of any of its layers.
    rank: int
    #: Linear layers that it adds to.
    num_layers: int
    #: Its place in the engine's memory, from 1.
    slot: int
    #: What keys of cached blocks begin with: one for each load, since other values compute other keys and values.
    cache_salt: bytes


class Adapters:
    """Loads adapters into slots, and removes them. memory: None where the engine was made without."""

    def __init__(self, memory: AdapterMemory | None) -> None:
        self._memory = memory
        self._loaded: dict[str, Adapter] = {}

    @property
    def loaded(self) -> Mapping[str, Adapter]:
        """The adapters by name, as they are now."""
        return MappingProxyType(dict(self._loaded))

    def find(self, name: str | None) -> tuple[int, bytes]:
        """Return slot and cache salt of an adapter, those of no adapter for None; raise `UsageError` if unknown."""
        if name is None:
            return NO_SLOT, b""
        adapter = self._loaded.get(name)
        if adapter is None:
            raise self._unknown(f"a request with lora={name!r}", name)
        return adapter.slot, adapter.cache_salt

    def load(self, name: str, folder: str | Path) -> Adapter:
        """Read an adapter into a free slot; raise `UsageError` where there is none, or for a name that is taken, and
        `ModelError` for a folder that does not fit the model. What is wrong leaves nothing behind."""
        asked = f"load_lora({name!r}, {str(folder)!r})"
        if not isinstance(name, str) or not name.strip():
            raise UsageError(asked, found="the name is empty", remedy="give the adapter a name")
        memory = self._with_memory(asked)
        if name in self._loaded:
            found = f"{name!r} is loaded already, from {str(self._loaded[name].path)!r}"
            raise UsageError(asked, found=found, remedy="give another name, or call unload_lora first")
        taken = {adapter.slot for adapter in self._loaded.values()}
        slot = next((each for each in range(1, memory.max_loras + 1) if each not in taken), None)
        if slot is None:
            found = f"all {memory.max_loras} slots are taken: {', '.join(map(repr, self._loaded))}"
            raise UsageError(asked, found=found, remedy="unload one of them, or make the engine with more max_loras")
        config = read_stated(folder)
        tensors = read_tensors(config)
        memory.check(asked_for(config.path), tensors)
        memory.write(slot, tensors)
        self._loaded[name] = adapter = Adapter(
            name=name,
            path=config.path,
            rank=max(down.shape[0] for down, _ in tensors.values()),
            num_layers=len(tensors),
            slot=slot,
            cache_salt=b"lora %d" % next(_loads),
        )
        return adapter

    def unload(self, name: str, slots_in_use: Collection[int]) -> None:
        """Empty an adapter's slot; raise `UsageError` for an unknown name, and for one that requests use."""
        asked = f"unload_lora({name!r})"
        memory = self._with_memory(asked)
        if name not in self._loaded:
            raise self._unknown(asked, name)
        slot = self._loaded[name].slot
        if slot in slots_in_use:
            found = "unfinished requests use it"
            raise UsageError(asked, found=found, remedy="finish them by step() or end them by abort() first")
        del self._loaded[name]
        memory.write(slot, {})

    def _with_memory(self, asked: str) -> AdapterMemory:
        if self._memory is None:
            found = "the engine was made without room for adapters"
            raise UsageError(asked, found=found, remedy="make it with EngineConfig(max_loras=1) or more")
        return self._memory

    def _unknown(self, asked: str, name: str) -> UsageError:
        self._with_memory(asked)
        near = get_close_matches(str(name), self._loaded, n=1)
        found = f"loaded are: {', '.join(map(repr, self._loaded)) or 'none'}"
        return UsageError(asked, found=found, remedy=f"did you mean {near[0]!r}?" if near else "call load_lora first")


def read_tensors(config: AdapterConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A (rank, in) and scaled B (out, rank) fp32 of each layer, by its path; `ModelError` for other tensors."""
    from safetensors.torch import load_file

    asked, file = asked_for(config.path), config.path / WEIGHTS_NAME
    problem = read_header(file, set())
    if isinstance(problem, str):
        raise ModelError(asked, found=f"{WEIGHTS_NAME}: {problem}", remedy="copy it again from where it came")
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        match = _KEY.fullmatch(key)
        if match is None:
            found = f"{WEIGHTS_NAME} holds {key!r}, which is no A or B of a linear layer"
            raise ModelError(asked, found=found, remedy="merge it into its base model, and load that")
        sides.setdefault(match["layer"], {})[match["side"]] = tensor.to(torch.float32)
    if not sides:
        raise ModelError(asked, found=f"{WEIGHTS_NAME} is empty", remedy="copy it again from where it came")
    for layer, found_sides in sides.items():
        rank = config.rank_of(layer)
        shapes = {side: tuple(tensor.shape) for side, tensor in found_sides.items()}
        pair = [shapes.get("A", ()), shapes.get("B", ())]
        if [len(shape) for shape in pair] != [2, 2] or pair[0][0] != rank or pair[1][1] != rank:
            found = f"{layer!r} is of rank {rank} and has A {pair[0]} and B {pair[1]}"
            raise ModelError(asked, found=found, remedy="take files of one and the same adapter")
    return {layer: (each["A"], each["B"] * config.scale_of(layer)) for layer, each in sides.items()}
