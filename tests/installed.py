"""Skips for what the installed transformers lacks, in any version that pyproject.toml allows: the reason names it."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

# With torch and the plugins alone, tests of transformers are skipped before they ask for its version.
TRANSFORMERS = version("transformers") if importlib.util.find_spec("transformers") else "0"
NEWEST = Version(TRANSFORMERS) >= Version("5.23")
"""Whether it is the version of the development environment, or a later one, which lacks nothing of this module."""


def skip_where(lacking: bool, what: str) -> None:
    """Skip the test that runs, where the installed transformers lacks what it needs. what: begins with a verb."""
    if lacking:
        pytest.skip(f"transformers {TRANSFORMERS} {what}")


def needs_type(model_type: str) -> None:
    """Skip where transformers has no model of this type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    skip_where(not NEWEST and model_type not in CONFIG_MAPPING_NAMES, f"has no model type {model_type!r}")


def needs_static_cache(model_type: str) -> None:
    """Skip where transformers itself can't run this model type on its own static cache, or not rightly."""
    older = Version(TRANSFORMERS) < Version("5.18")
    # Bloom's position bias is built for the tokens seen, and not for the cache.
    skip_where(
        older and model_type in ("bloom", "doge", "roformer"), f"gives other logits for {model_type} on its cache"
    )


def needs_prediction_layers() -> None:
    """Skip where transformers can't run a checkpoint's own prediction layers."""
    found: Any = getattr(importlib.import_module("transformers.modeling_layers"), "MtpModel", None)
    skip_where(not NEWEST and not hasattr(found, "forward_layer"), "can't run prediction layers")
