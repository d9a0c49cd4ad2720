"""The `quantization_config` of a compressed-tensors checkpoint: read into schemes, and written from one.

The format: https://github.com/neuralmagic/compressed-tensors. Groups of layers, each with its targets (class names,
module paths, "re:" and a regular expression) and the arguments of its weights and input activations; layers to ignore.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from core.errors import ModelError
from core.quantization.scheme import FP8, ActivationScheme, QuantizationScheme, WeightScheme
from core.quantization.targets import matches

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", PACKED)
_MIXED = "mixed-precision"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers quantised alike."""

    name: str
    #: Class names, module paths, or "re:" and an expression.
    targets: tuple[str, ...]
    scheme: QuantizationScheme
    #: Whether weights are stored as int32 words.
    packed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """A checkpoint's statements about its layers."""

    groups: tuple[Group, ...]
    #: Layers that are not quantised, named as targets are.
    ignore: tuple[str, ...] = ()
    #: Settings of the checkpoint that are not applied, one line each.
    warnings: tuple[str, ...] = ()
    #: Whether its attention layers bring scales of a key/value cache of fp8 codes.
    cache_scales: bool = False

    def renamed(self, rename: Callable[[str], str]) -> CheckpointConfig:
        """Return the same statements, in which a path of the files also stands for the model's path of that layer.

        Expressions can't be renamed: `group_of` compares them with both paths.
        """

        def both(patterns: tuple[str, ...]) -> tuple[str, ...]:
            paths = [rename(each) for each in patterns if not each.startswith("re:")]
            return tuple(dict.fromkeys((*patterns, *paths)))

        groups = tuple(replace(group, targets=both(group.targets)) for group in self.groups)
        return replace(self, groups=groups, ignore=both(self.ignore))

    def group_of(self, names: Sequence[str], kind: str) -> Group | None:
        """Return the group of the layer of class kind at one path or several, None where it is ignored or no target.

        A path wins over an expression, and that over a class.
        """
        if any(matches(pattern, name, kind) for pattern in self.ignore for name in names):
            return None
        found = [
            (_rank(target, names), index)
            for index, group in enumerate(self.groups)
            for target in group.targets
            if any(matches(target, name, kind) for name in names)
        ]
        return self.groups[min(found)[1]] if found else None


def _rank(target: str, names: Sequence[str]) -> int:
    return 0 if target in names else 1 if target.startswith("re:") else 2


def stated_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the compressed-tensors part of a `config.json`, None where it states none."""
    older = config.get("compression_config")  # the place in early checkpoints
    stated = config.get("quantization_config", older)
    return stated if isinstance(stated, dict) and stated.get("quant_method") == METHOD else None


def parse_config(asked: str, stated: Mapping[str, Any]) -> CheckpointConfig:
    """Return the layers' schemes; raise `ModelError`, naming the field, for what is malformed or not supported here."""
    return _Parser(asked, stated).parse()


_CACHE_SCHEME = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "strategy": ("tensor", "attn_head", None),
}
"""Values of a `kv_cache_scheme` whose scales suit `core::attention`; None: the field must be absent."""


def _why_unfit_cache(scheme: Any) -> str:
    """Return why scales of this `kv_cache_scheme` are not those of a cache of fp8 codes, "" where they are."""
    if not isinstance(scheme, dict):
        return f"it is {scheme!r}, no object"
    stated = ((field, scheme.get(field), known) for field, known in _CACHE_SCHEME.items())
    return next((f"its {field} is {value!r}" for field, value, known in stated if value not in known), "")


class _Parser:
    """Reads one configuration; `asked` is the first part of its errors."""

    def __init__(self, asked: str, stated: Mapping[str, Any]) -> None:
        self._asked, self._stated = asked, stated

    def parse(self) -> CheckpointConfig:
        self._refuse_transforms()
        groups = self._stated.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise self._error("config_groups", f"is {groups!r}, no object of groups")
        ignore = self._stated.get("ignore") or []
        if not isinstance(ignore, list) or not all(isinstance(each, str) for each in ignore):
            raise self._error("ignore", f"is {ignore!r}, no list of names")
        scheme = self._stated.get("kv_cache_scheme")
        unfit = _why_unfit_cache(scheme) if scheme else ""
        return CheckpointConfig(
            groups=tuple(self._group(name, group) for name, group in groups.items()),
            ignore=tuple(ignore),
            warnings=(f"kv_cache_scheme is not applied, its scales are not read: {unfit}",) if unfit else (),
            cache_scales=bool(scheme) and not unfit,
        )

    def _refuse_transforms(self) -> None:
        sparsity = self._stated.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise self._error("sparsity_config.format", f"is {sparsity['format']!r}; sparse weights are not supported")
        if (self._stated.get("transform_config") or {}).get("config_groups"):
            raise self._error("transform_config", "asks for rotations of the weights, which are not supported")

    def _group(self, name: str, group: Any) -> Group:
        field = f"config_groups.{name}"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise self._error(field, "states no weights; layers with quantised activations alone are not supported")
        targets = group.get("targets")
        if not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
            raise self._error(f"{field}.targets", f"is {targets!r}, no list of layers")
        if group.get("output_activations"):
            raise self._error(f"{field}.output_activations", "is stated; quantised outputs are not supported")
        layout = self._format(f"{field}.format", group)
        inputs = group.get("input_activations")
        activations = self._activations(f"{field}.input_activations", inputs) if inputs else None
        weights = self._weights(f"{field}.weights", group["weights"], weight_only=activations is None)
        if activations is not None and (weights.dtype != activations.dtype or weights.num_bits != 8):
            raise self._error(field, "weights and activations differ in type or are not 8 bits wide: not supported")
        if layout == PACKED and (weights.dtype == FP8 or activations is not None):
            raise self._error(f"{field}.format", f"is {PACKED!r}, which holds integer weights of weight-only layers")
        if weights.num_bits == 4 and layout != PACKED:
            raise self._error(f"{field}.format", f"is {layout!r}; 4-bit weights are read as {PACKED!r}")
        scheme = QuantizationScheme(name=_name(weights, activations), weights=weights, activations=activations)
        return Group(name=name, targets=tuple(targets), scheme=scheme, packed=layout == PACKED)

    def _format(self, field: str, group: Mapping[str, Any]) -> str:
        whole = self._stated.get("format")
        layout = group.get("format") or (whole if whole != _MIXED else None)
        if layout not in _FORMATS:
            known = f"the formats read here are {', '.join(_FORMATS)}"
            close = difflib.get_close_matches(str(layout), _FORMATS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise self._error(field if group.get("format") else "format", f"is {layout!r}; {known}{hint}")
        return str(layout)

    def _weights(self, field: str, stated: Mapping[str, Any], *, weight_only: bool) -> WeightScheme:
        dtype, num_bits = self._type(field, stated, (4, 8) if weight_only else (8,))
        group_size = stated.get("group_size") or 0
        strategy = stated.get("strategy") or {0: "tensor", -1: "channel"}.get(group_size, "group")
        known = ("tensor", "channel", "group") if weight_only else ("tensor", "channel")
        if strategy not in known:
            raise self._error(f"{field}.strategy", f"is {strategy!r}; known here are {', '.join(known)}")
        if strategy == "group" and (not isinstance(group_size, int) or group_size <= 0):
            raise self._error(f"{field}.group_size", f"is {group_size!r}, no positive number of weights")
        if stated.get("dynamic"):
            raise self._error(f"{field}.dynamic", "is true; weights have scales of their own in the checkpoint")
        if stated.get("actorder") == "group":
            raise self._error(f"{field}.actorder", "is 'group'; groups of reordered columns are not supported")
        return WeightScheme(
            dtype=dtype,
            num_bits=num_bits,
            granularity="group" if strategy == "group" else "channel",
            group_size=group_size if strategy == "group" else 0,
            symmetric=self._symmetric(field, stated, dtype),
        )

    def _activations(self, field: str, stated: Mapping[str, Any]) -> ActivationScheme:
        dtype, _ = self._type(field, stated, (8,))
        dynamic = stated.get("dynamic", False)
        if not isinstance(dynamic, bool):
            raise self._error(f"{field}.dynamic", f"is {dynamic!r}; known here are true and false")
        strategy = stated.get("strategy") or ("token" if dynamic else "tensor")
        if strategy not in ("token", "tensor") or (strategy == "token" and not dynamic):
            kind = "dynamic" if dynamic else "static"
            raise self._error(
                f"{field}.strategy", f"is {strategy!r}; {kind} scales are by tensor or, dynamic, by token"
            )
        symmetric = self._symmetric(field, stated, dtype)
        return ActivationScheme(dtype=dtype, granularity=strategy, dynamic=dynamic, symmetric=symmetric)

    def _type(self, field: str, stated: Mapping[str, Any], bits: tuple[int, ...]) -> tuple[torch.dtype, int]:
        kind, num_bits = stated.get("type", "int"), stated.get("num_bits", 8)
        if (kind, num_bits) == ("float", 8):
            return FP8, 8
        if kind == "int" and num_bits in bits:
            return torch.int8, num_bits
        known = ", ".join(["float of 8 bits", *(f"int of {each} bits" for each in bits)])
        raise self._error(field, f"is {kind} of {num_bits} bits; known here are {known}")

    def _symmetric(self, field: str, stated: Mapping[str, Any], dtype: torch.dtype) -> bool:
        symmetric = stated.get("symmetric", True)
        if not isinstance(symmetric, bool) or (dtype == FP8 and not symmetric):
            raise self._error(f"{field}.symmetric", f"is {symmetric!r}; zero points go with integers alone")
        return symmetric

    def _error(self, field: str, problem: str) -> ModelError:
        return ModelError(
            self._asked,
            found=f"quantization_config: {field} {problem}",
            remedy="use a checkpoint of a scheme that docs/quantization.md lists, or quantise the original model here",
        )


def _name(weights: WeightScheme, activations: ActivationScheme | None) -> str:
    """Return its name in the style of `SCHEMES`."""
    if activations is None:
        name = "w8a16-fp8" if weights.dtype == FP8 else f"w{weights.num_bits}a16"
        name += "" if weights.symmetric else "-asymmetric"
        return f"{name}-g{weights.group_size}" if weights.group_size else name
    name = "fp8" if weights.dtype == FP8 else "int8"
    name += "" if activations.dynamic else "-static"
    name += "-by-tensor" if activations.dynamic and activations.granularity == "tensor" else ""
    return name if activations.symmetric else f"{name}-asymmetric"


def make_config(
    layers: Mapping[QuantizationScheme, Sequence[str]], ignore: Sequence[str], *, cache_strategy: str = ""
) -> dict[str, Any]:
    """Return the `quantization_config` of a model. layers: paths by scheme; ignore: paths of the other linear layers.

    One scheme is stated for all linear layers, several for the layers by name. cache_strategy: "tensor" or "attn_head"
    where scales of an fp8 key/value cache are stored beside the layers.
    """
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": cache_strategy}
    groups = {
        f"group_{index}": _group(scheme, ["Linear"] if len(layers) == 1 else list(names))
        for index, (scheme, names) in enumerate(layers.items())
    }
    formats = {str(group["format"]) for group in groups.values()}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": cache if cache_strategy else None,
    }


def _group(scheme: QuantizationScheme, targets: list[str]) -> dict[str, Any]:
    weights, inputs = scheme.weights, scheme.activations
    kind = "float" if weights.dtype == FP8 else "int"
    common = {"type": kind, "actorder": None, "block_structure": None}
    group: dict[str, Any] = {
        "targets": targets,
        "format": f"{kind}-quantized" if inputs is not None or kind == "float" else PACKED,
        "weights": {
            **common,
            "num_bits": weights.num_bits,
            "symmetric": weights.symmetric,
            "strategy": weights.granularity,
            "group_size": weights.group_size or None,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }
    if inputs is not None:
        group["input_activations"] = {
            **common,
            "num_bits": 8,
            "symmetric": inputs.symmetric,
            "strategy": inputs.granularity,
            "group_size": None,
            "dynamic": inputs.dynamic,
        }
    return group
