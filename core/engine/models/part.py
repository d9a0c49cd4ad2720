"""Reads only this process's part of a model's weights: what `shard_model` would cut is cut while it is read.

transformers builds the model without memory, and copies each tensor of the files into it. Here the model is sharded in
between, and the files give the parts that then fit. All else (names, dtypes, tied weights, buffers) stays its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from core.common.ops.collective.collectives import group_size
from core.engine.models.hf import import_transformers
from core.engine.models.sharding import ExpertCut, cut_parameters, plan_of, shard_model
from core.engine.models.sharding.cuts import Cut, rank_in
from core.quantization.layers import num_weights


@dataclass(kw_only=True, slots=True)
class WeightsRead:
    """What a process read of a model's weight files."""

    #: Bytes of tensors that were read.
    num_bytes: int = 0
    #: Bytes of all tensors of the files.
    total_bytes: int = 0
    #: Why all were read although the model is sharded; "" where only a part was.
    whole: str = ""

    @classmethod
    def of_all(cls, files: tuple[Path, ...], why: str) -> WeightsRead:
        """Return that all of the files was read. why: although the model is sharded."""
        num_bytes = sum(_bytes_of(file) for file in files)
        return cls(num_bytes=num_bytes, total_bytes=num_bytes, whole=why)

    def __str__(self) -> str:
        text = f"{self.num_bytes / 2**20:.1f} of {self.total_bytes / 2**20:.1f} MiB"
        return f"{text}: {self.whole}" if self.whole else text


@dataclass(kw_only=True, slots=True)
class PartReader:
    """Reads a sharded model; call it as `read_folder`'s result is called."""

    path: Path
    files: tuple[Path, ...]
    config: Any
    dtype: torch.dtype
    #: Called with options as `read_folder`, for a model that can't be read in parts.
    read_whole: Callable[..., Any]
    experts: ExpertCut = "width"
    read: WeightsRead = field(default_factory=WeightsRead)
    #: Weights of the whole model.
    num_parameters: int = 0

    def __call__(self, **options: Any) -> Any:
        """Return the sharded model with transformers' account of its weights; `UsageError` as `shard_model` does."""
        with torch.device("meta"):
            probe = import_transformers().AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        self.num_parameters = num_weights(probe)
        early, late = _plans(probe, self.experts)
        cuts = cut_parameters(probe, early, group_size(""))
        whole = _why_whole(self.files, cuts, probe)
        self.read = WeightsRead.of_all(self.files, whole)
        if not whole:
            self.read.num_bytes = 0
        else:
            model, account = self.read_whole(**options)
            return shard_model(model, plan_of(model, group_size(""), self.experts)), account
        with _parts_only(cuts, self.read):
            model, account = _sharding(type(probe), early).from_pretrained(
                self.path,
                config=self.config,
                dtype=self.dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        model.__class__ = type(probe)
        return (shard_model(model, late) if late else model), account


def _owners(probe: nn.Module) -> list[list[str]]:
    """Return the names of each parameter: several where modules share it."""
    names: dict[int, list[str]] = {}
    for name, parameter in probe.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _plans(probe: nn.Module, experts: ExpertCut) -> tuple[dict[str, str], dict[str, str]]:
    """Return what is cut before the weights are read, and what after: a module whose weight another one has too, which
    is not cut."""
    plan = plan_of(probe, group_size(""), experts)
    shared = [{name.removesuffix(".weight") for name in names} for names in _owners(probe) if len(names) > 1]
    late = {name for names in shared if not plan.keys() >= names for name in names}
    return (
        {line: style for line, style in plan.items() if line not in late},
        {line: style for line, style in plan.items() if line in late},
    )


def _why_whole(files: tuple[Path, ...], cuts: Mapping[str, Cut], probe: nn.Module) -> str:
    """Return why the files can't be read in parts: they hold the cut weights under other names, or merged."""
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    shapes = {name: tuple(tensor.shape) for name, tensor in probe.state_dict().items()}
    for names in _owners(probe):
        if names[0] in cuts and not any(found.get(name) == shapes[name] for name in names):
            return f"the files do not hold {names[0]} as the model does"
    if not hasattr(import_transformers().modeling_utils, "safe_open"):
        return "this version of transformers opens files in another way"
    return ""


def _bytes_of(file: Path) -> int:
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    return file.stat().st_size - 8 - header


def _sharding(kind: type[nn.Module], plan: Mapping[str, str]) -> Any:
    """Return the class of a model whose layers are cut as soon as they are made, without memory yet."""

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        kind.__init__(self, *args, **named)
        if plan:
            shard_model(self, plan)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


@contextmanager
def _parts_only(cuts: Mapping[str, Cut], read: WeightsRead) -> Iterator[None]:
    """Let transformers read the parts of cut parameters alone, and count what it reads."""
    library: Any = import_transformers().modeling_utils
    place = rank_in(""), group_size("")

    class Opened:
        """A file of whose tensors parts are seen."""

        def __init__(self, *args: Any, **named: Any) -> None:
            self._file: Any = cast("Any", safe_open)(*args, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Opened:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_slice(self, name: str) -> _Part:
            return _Part(self._file.get_slice(name), cuts.get(name), place, read)

    before = library.safe_open
    library.safe_open = Opened
    try:
        yield
    finally:
        library.safe_open = before


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a file, of which this process sees its part; with the interface of a slice of safetensors."""

    whole: Any
    cut: Cut | None
    place: tuple[int, int]
    read: WeightsRead

    def __getitem__(self, index: Any) -> Tensor:
        rank, count = self.place
        if self.cut is None:
            found: Tensor = self.whole[index]
        elif self.cut.dim is None and rank > 0:
            like: Tensor = self.whole[:0]
            return torch.zeros(self.whole.get_shape(), dtype=like.dtype)[index]
        else:
            found = self.cut.read(self.whole, tuple(self.whole.get_shape()), rank, count)[index]
        self.read.num_bytes += found.nbytes
        return found

    def get_shape(self) -> list[int]:
        """Return the shape of the part."""
        shape = tuple(self.whole.get_shape())
        return list(shape if self.cut is None else self.cut.shape(shape, self.place[1]))

    def get_dtype(self) -> str:
        """Return the dtype as safetensors names it."""
        return str(self.whole.get_dtype())
