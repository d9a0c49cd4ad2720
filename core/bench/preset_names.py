"""The names of presets: what a command line is checked by, before torch is imported."""

from __future__ import annotations

import difflib

from core.errors import UsageError

PRESET_NAMES = (
    *("llama-100m", "llama-1b", "llama-8b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"),
    *("tiny-llama", "tiny-qwen3", "tiny-moe"),
)
"""The keys of `core.bench.presets.PRESETS`."""


def check_preset(name: str | None) -> None:
    """Raise `UsageError` that lists the known ones for a text that is neither the name of a preset nor a `.json`
    file; None is allowed."""
    if name is not None and not name.endswith(".json") and name not in PRESET_NAMES:
        close = difflib.get_close_matches(name, PRESET_NAMES, 1)
        raise UsageError(
            f"--preset {name!r}",
            found=f"the presets are {', '.join(PRESET_NAMES)}",
            remedy=f"did you mean {close[0]!r}?" if close else "name one of these, or the path of a config.json",
        )
