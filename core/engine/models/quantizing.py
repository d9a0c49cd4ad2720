"""Quantise a loaded model as a command asks: `--quantize SCHEME`, with text of `--calibration FILE`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from core.engine.models.checkpoint import Progress
from core.engine.models.loading import LoadedModel
from core.errors import UsageError
from core.quantization.layers import num_weights
from core.quantization.names import check_options
from core.quantization.quantize import quantize
from core.quantization.scheme import QuantizationScheme, find_scheme

TEXT = """\
The river had been rising since the morning, and by noon the lower road was under water. Most people had left.
If the list is empty, the function returns None; otherwise it returns the first element that satisfies the condition.
In 1905 he published four papers, on light, on motion, on time and space, and on the equivalence of mass and energy.
"Where did you put the keys?" she asked. "On the table," he said, "next to the letter that came for you yesterday."
def mean(values): return sum(values) / len(values) if values else 0.0
The recipe needs 250 g of flour, two eggs, a pinch of salt and half a litre of milk; let it rest for thirty minutes.
"""
"""The default calibration text of models with a tokenizer: prose, dialogue, code and numbers."""

_NUM_RANDOM, _MAX_TOKENS, _MAX_SAMPLES = 4, 128, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantize:
    """The quantisation that a command asks for."""

    scheme: QuantizationScheme
    #: A text file, each line of which is a sample; None for a built-in text.
    calibration: Path | None = None
    #: Whether to measure what each layer costs the model as a whole (`core.quantize`).
    sensitivity: bool = False

    @classmethod
    def of(cls, scheme: str | None, calibration: Path | None, *, sensitivity: bool = False) -> Quantize | None:
        """Return what the options ask for, None for nothing; raise `UsageError` for an unknown scheme."""
        check_options(scheme, calibration, sensitivity=sensitivity)
        if scheme is not None:
            return cls(scheme=find_scheme(scheme), calibration=calibration, sensitivity=sensitivity)
        return None

    def apply(self, loaded: LoadedModel, progress: Progress | None = None) -> LoadedModel:
        """Quantise the model in place and return the quantised model; raise `UsageError` as `core.quantize` does."""
        batches = calibration_batches(loaded, self.calibration)
        quantize(loaded.model, self.scheme, calibration=batches, sensitivity=self.sensitivity, progress=progress)
        return replace(loaded, num_parameters=num_weights(loaded.model))


def calibration_batches(loaded: LoadedModel, file: Path | None = None) -> list[Tensor]:
    """Return token ids (1, T), one tensor per sample, on the model's device.

    The lines of the file, else of a built-in text; for a model without tokenizer random ids, always the same. At most
    64 samples of at most 128 tokens. Raises `UsageError` for a file that cannot be read or holds no text, and
    `ModelError` for one that the model has no tokenizer for.
    """
    device = next(loaded.model.parameters()).device
    length = min(_MAX_TOKENS, loaded.max_position or _MAX_TOKENS)
    if file is None and loaded.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, loaded.vocab_size, (_NUM_RANDOM, 1, length), generator=generator)
        return list(ids.to(device))
    lines = [line for line in (TEXT if file is None else _read(file)).splitlines() if line.strip()]
    tokenizer = loaded.require_tokenizer()
    encoded = [tokenizer.encode(line)[:length] for line in lines[:_MAX_SAMPLES]]
    return [torch.tensor([ids], device=device) for ids in encoded if ids]


def _read(file: Path) -> str:
    asked = f"--calibration {str(file)!r}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(asked, found=f"it cannot be read as text: {error}", remedy="name a UTF-8 text file") from None
    if not text.strip():
        raise UsageError(asked, found="it is empty", remedy="name a text file with one sample per line")
    return text
