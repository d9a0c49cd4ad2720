"""Access to transformers, which is optional: import it, keep it offline, and collect its messages."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from core.common.collector import paused
from core.engine.models.checkpoint import Progress
from core.engine.models.importing import import_lean
from core.errors import ModelError, one_line
from core.host.distributions.installing import pip_install


def import_transformers() -> ModuleType:
    """Import transformers, which is optional; raises ModelError naming the extra where it is not installed."""
    try:
        with paused():  # modules live on: the collector would walk all of them at many imports
            return import_lean()
    except ModuleNotFoundError as error:
        raise ModelError(
            "load a transformers model",
            found=f"the module {error.name!r} is not installed",
            remedy=pip_install("hf"),
        ) from None


def unusable(error: ImportError, asked: str = "use transformers") -> ModelError:
    """Return the error for a package that transformers finds installed and can't import, whatever the device."""
    return ModelError(
        asked,
        found=f"transformers imports a package that is installed and can't be loaded: {one_line(str(error))}",
        remedy="install what that package needs, or uninstall it (transformers uses what it finds, on any device)",
    )


class _Steps:
    """Replaces the tqdm bars of transformers: reports each count to `progress`."""

    def __init__(self, steps: Iterable[Any], total: int, progress: Progress) -> None:
        self._steps, self._total, self._progress = steps, total, progress

    def __iter__(self) -> Iterator[Any]:
        self._progress("load weights", 0, self._total)
        for done, step in enumerate(self._steps, start=1):
            yield step
            self._progress("load weights", done, self._total)


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._messages:
            self._messages.append(message)


@contextmanager
def driven(progress: Progress | None) -> Iterator[list[str]]:
    """Keep transformers offline and off the terminal: its bars call `progress`, its warnings go to the list."""
    import_transformers()
    bars: Any = importlib.import_module("transformers.utils.logging")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    logger = logging.getLogger("transformers")
    messages: list[str] = []

    def hook(_factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The one bar that counts tensors; others (quantizers have some) stay silent.
        if progress is not None and kwargs.get("desc") == "Loading weights" and args:
            return _Steps(args[0], len(args[0]), progress)
        return bars.EmptyTqdm(*args, **kwargs)

    offline, handlers, propagate, level = constants.HF_HUB_OFFLINE, logger.handlers[:], logger.propagate, logger.level
    previous = bars.set_tqdm_hook(hook)
    constants.HF_HUB_OFFLINE = True
    logger.handlers, logger.propagate = [_Collector(messages)], False
    logger.setLevel(logging.WARNING)
    try:
        yield messages
    except ImportError as error:  # transformers looks for packages that it can use, and imports those it finds
        raise unusable(error) from error
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
        constants.HF_HUB_OFFLINE = offline
        bars.set_tqdm_hook(previous)
