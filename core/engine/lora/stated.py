"""What the folder of an adapter states, in PEFT's `adapter_config.json`; torch is not imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.engine.models.statements import parse_json
from core.errors import ModelError
from core.paths import local_path

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_MAX_RANK = 2**16
_REFUSED = {
    "use_dora": "DoRA scales the layer's own weight, too",
    "modules_to_save": "whole modules of the model are replaced",
    "trainable_token_indices": "rows of the embedding are replaced",
    "target_parameters": "parameters that belong to no linear layer are adapted",
    "layer_replication": "the model gets further layers",
    "lora_bias": "B has a bias",
    "alora_invocation_tokens": "only some of a prompt's tokens have the adapter",
    **dict.fromkeys(("use_qalora", "use_bdlora"), "A or B has another shape"),
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "monteclora_config", "velora_config"), "it adds something else than x A^T B^T"
    ),
}
"""Fields of PEFT's that ask for more than x A^T B^T beside a layer, and what for."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """An adapter as its configuration states it."""

    path: Path
    rank: int
    alpha: float
    #: Whether the scale is alpha by the root of the rank, not by the rank.
    rank_stabilised: bool
    #: Of some layers, by patterns of their paths.
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @property
    def max_rank(self) -> int:
        """The largest rank of any layer."""
        return max((self.rank, *self.ranks.values()))

    def rank_of(self, layer: str) -> int:
        """Return the rank at a layer, by its path in the model."""
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, layer)), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the factor of B at a layer, by its path in the model."""
        rank = self.rank_of(layer)
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, layer)), self.alpha)
        return float(alpha / (rank**0.5 if self.rank_stabilised else rank))


def asked_for(path: Path) -> str:
    """Return the first line of every error about the adapter in the folder `path`."""
    return f"load the adapter {str(path)!r}"


def read_stated(folder: str | Path) -> AdapterConfig:
    """Read a folder's `adapter_config.json`; raise `ModelError` for what is no LoRA adapter, or more than one."""
    path = local_path(f"load the adapter {str(folder)!r}", folder)
    asked = asked_for(path)
    missing = [name for name in (CONFIG_NAME, WEIGHTS_NAME) if not (path / name).is_file()]
    if missing:
        found = f"it has no {' and no '.join(missing)}"
        raise ModelError(asked, found=found, remedy="pass a folder that PEFT's save_pretrained has written")
    remedy = f"correct {CONFIG_NAME}, or copy it again from where the adapter came"
    try:
        stated = parse_json((path / CONFIG_NAME).read_bytes())
    except ValueError as error:
        raise ModelError(asked, found=f"{CONFIG_NAME} is not JSON: {error}", remedy=remedy) from None
    problem = _problem(stated)
    if problem:
        raise ModelError(asked, found=f"{CONFIG_NAME}: {problem}", remedy=remedy)
    refused = _refusal(stated)
    if refused:
        merge = "merge it into its base model (peft: `merge_and_unload()`, then `save_pretrained`), and load that"
        raise ModelError(asked, found=refused, remedy=merge)
    return AdapterConfig(
        path=path,
        rank=stated["r"],
        alpha=stated["lora_alpha"],
        rank_stabilised=bool(stated.get("use_rslora")),
        ranks=stated.get("rank_pattern") or {},
        alphas=stated.get("alpha_pattern") or {},
    )


def _problem(stated: Any) -> str:
    """Return what is wrong with the fields that are read, or ""."""
    if not isinstance(stated, dict):
        return f"it holds a JSON {type(stated).__name__}, not an object"
    if stated.get("peft_type") != "LORA":
        return f"peft_type is {stated.get('peft_type')!r}, not 'LORA'"
    ranks, alphas = (stated.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    if not (isinstance(ranks, dict) and isinstance(alphas, dict) and all(map(_is_pattern, (*ranks, *alphas)))):
        return "rank_pattern and alpha_pattern are objects whose names are regular expressions"
    for name, value in (("r", stated.get("r")), *ranks.items()):
        if not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_RANK):
            return f"the rank {name!r} is {value!r}, not a number from 1 to {_MAX_RANK}"
    for name, value in (("lora_alpha", stated.get("lora_alpha")), *alphas.items()):
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"{name!r} is {value!r}, not a number"
    return ""


def _refusal(stated: Mapping[str, Any]) -> str:
    """Return why an adapter is more than is applied here, or ""."""
    if stated.get("bias") not in (None, "none"):
        return f"bias={stated['bias']!r}: it changes biases of the model"
    start = stated.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        return f"init_lora_weights={start!r}: it belongs to a model with other weights than its base"
    asked = next((name for name in _REFUSED if stated.get(name)), None)
    return "" if asked is None else f"{asked}={stated[asked]!r}: {_REFUSED[asked]}"


def _matches(pattern: str, layer: str) -> bool:
    return re.match(_whole(pattern), layer) is not None


def _whole(pattern: str) -> str:
    """Return the expression that PEFT matches: of a whole path, or of what stands behind a point in it."""
    return rf"(.*\.)?({pattern})$"


def _is_pattern(text: str) -> bool:
    try:
        re.compile(_whole(text))
    except re.error:
        return False
    return True
