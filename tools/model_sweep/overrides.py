"""Sizes of what text models don't have, and what single model types need for a tiny configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from core.engine.models.tiny_rules import HEADS

IMAGE, PATCH = 64, 16

_RULES: tuple[tuple[str, int | float], ...] = (
    (r"(image|input|img)_size|size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_frames|frames_per_clip", 4),
    (r"num_queries|num_detection_tokens|two_stage_num_proposals", 12),
    (r"num_labels|num_classes", 10),
    (r"num_mel_bins", 16),
)
VISION_SIZES = tuple((re.compile(pattern), value) for pattern, value in _RULES)

_RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}
_OWN_BACKBONE = {
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
    "backbone_config": {**_RESNET, "out_features": ["stage4"]},
}

# Only what the rules can't know, each with its reason.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # The code asks for a language before it runs.
    "xmod": {"default_language": "en_XX"},
    # Their defaults take a backbone of timm's.
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _OWN_BACKBONE),
    # It has no fewer heads for keys than for queries.
    "esmc": {"num_key_value_heads": HEADS},
    # The classes leave open how many tokens they know.
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
}
