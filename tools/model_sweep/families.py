"""Which classes of transformers are swept, and their tiny random models."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from core.engine.models.hf import driven
from core.engine.models.tiny import shrunk_config
from core.engine.models.tiny_rules import SIZES, TinyRules
from model_sweep.overrides import CONFIGS, VISION_SIZES

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "text": ("MASKED_LM", "TEXT_ENCODING"),
    "vision": (
        *("IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
        *("INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "MASKED_IMAGE_MODELING"),
        *("IMAGE_TO_IMAGE", "KEYPOINT_DETECTION", "IMAGE"),
    ),
    "audio": (
        *("CTC", "AUDIO_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM"),
        *("AUDIO_XVECTOR", "RNNT", "TDT"),
    ),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "image and text": ("ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION", "VISUAL_QUESTION_ANSWERING"),
}
"""Names of transformers' automatic classes by family; of a model type, the class of the first that has it is swept."""

MOST_PARAMETERS = 90_000_000
"""Of a class whose sizes no rule makes small."""
LABELS = 64
"""So many logits are enough to be judged."""
_RULES = TinyRules(
    sizes=(*VISION_SIZES, *SIZES),
    switches={},
    overrides=CONFIGS,
)


def classes(family: str) -> dict[str, str]:
    """Return the name of the class of each model type of a family, in the alphabetical order of types."""
    with driven(None):
        auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, str] = {}
    for name in FAMILIES[family]:
        for model_type, known in getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            found.setdefault(model_type, known if isinstance(known, str) else known[0])
    return dict(sorted(found.items()))


def models(family: str, model_type: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the class as a random fp32 model in evaluation mode, in up to three sizes, each with its name.

    tiny: by the rules for tiny sizes. small: its default with small pictures and fewer layers. default: as it is, where
    it is not too large. The later ones are for classes whose sizes depend on each other in ways that no rule knows.
    Raises what the first of them raises where none can be built.
    """
    model_class = _model_class(family, model_type)
    problems: list[Exception] = []
    for sizes, config in (("tiny", _tiny), ("small", _small), ("default", _default)):
        try:
            made = config(model_type)
            if sizes != "tiny":
                _check_size(model_class, made)
            model = _built(model_class, made)
        except Exception as error:  # whatever a configuration or a class raises
            problems.append(error)
            continue
        yield sizes, model
    if len(problems) == 3:
        raise problems[0]


def _check_size(model_class: Any, config: Any) -> None:
    """Raise `ValueError` for a model that is too large to be run here."""
    with torch.device("meta"):
        count = sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"its default configuration has {count / 1e6:.0f} M parameters")


def _model_class(family: str, model_type: str) -> Any:
    import transformers

    return getattr(transformers, classes(family)[model_type])


def _tiny(model_type: str) -> Any:
    return shrunk_config(model_type, _RULES)


def _default(model_type: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **CONFIGS.get(model_type, {}))


def _small(model_type: str) -> Any:
    return shrunk_config(model_type, TinyRules(sizes=VISION_SIZES, switches={}, overrides=CONFIGS, vocab_size=512))


def _built(model_class: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    wanted = model_class.config_class
    if not isinstance(config, wanted):  # a class of a part: the text model of what also sees images, say
        config = next((part for part in vars(config).values() if isinstance(part, wanted)), config)
    if hasattr(config, "num_labels"):
        config = copy.deepcopy(config)
        config.num_labels = LABELS
    model: nn.Module = model_class(copy.deepcopy(config)).eval().requires_grad_(False)
    # Weights of exactly 1 and biases of exactly 0 hide a step that is left out or done twice.
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1 and tensor.numel() and bool((tensor == tensor[0]).all()):
            spread = torch.randn_like(tensor).mul_(0.1)
            tensor.add_(spread.abs_() if tensor[0] > 0 else spread)
    return model
