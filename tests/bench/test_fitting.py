"""core/bench/fitting.py: by default a bench asks for no more than the model has positions for."""

from __future__ import annotations

import pytest

from core.bench.bench import Settings
from core.bench.fitting import fitted, positions_of
from core.errors import UsageError

BY_DEFAULT = {"context": True, "prompts": True}


@pytest.mark.parametrize(
    ("positions", "context", "prompts"),
    [
        (None, 1024, (128, 1024, 4096)),
        (131_072, 1024, (128, 1024, 4096)),
        (4097, 1024, (128, 1024)),  # two more tokens come with a prompt
        (512, 256, (128,)),
        (200, 32, (128,)),
    ],
)
def test_sizes_by_default_are_those_that_fit(positions: int | None, context: int, prompts: tuple[int, ...]) -> None:
    found = fitted(Settings(), positions, **BY_DEFAULT)
    found.check_length(positions)
    assert (found.context, found.prompts) == (context, prompts)
    left_out = {f"prefill/{each}" for each in (128, 1024, 4096) if each not in prompts}
    assert found.missing == dict.fromkeys(left_out, f"the model has {positions} positions")


def test_what_was_asked_for_is_kept_and_refused() -> None:
    for asked in ({"context": False, "prompts": True}, {"context": True, "prompts": False}):
        with pytest.raises(UsageError):
            fitted(Settings(), 512, **asked).check_length(512)
    with pytest.raises(UsageError):
        fitted(Settings(), 100, **BY_DEFAULT).check_length(100)


def test_the_positions_are_known_before_a_model_is_loaded(tmp_path: object) -> None:
    assert positions_of(None, None) == 512  # the embedded model
    assert positions_of("llama", None) == 256
    assert positions_of(None, "llama-8b") == 131_072
    assert positions_of(str(tmp_path), None) is None
    with pytest.raises(UsageError, match="--preset 'gpt-9'"):
        positions_of(None, "gpt-9")
