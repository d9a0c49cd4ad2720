"""Whether a model can be computed without a cache, and what of an engine's configuration needs one."""

from __future__ import annotations

from typing import Any

from core.compilation.account import num_ranks
from core.engine.recompute.model import WholeForward
from core.engine.recompute.self_check import Probes, choose_way
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError, UsageError
from core.quantization.layers import continuous

COST = "every step computes all tokens again, at a cost that grows with the square of the length"


def open_whole(
    model: Any, config: EngineConfig, *, max_model_len: int, reason: str
) -> tuple[WholeForward, str, Probes]:
    """Return the model's forward on whole sequences, how these are laid out, in words, and the probes that showed it.

    reason: why it has no cache, for the `ModelError` where its forward is not what it generates by.
    """
    try:
        with continuous(model):  # what is compared is the layout, not which side of a step a code falls to
            way, manner, probes = choose_way(model, max_model_len=max_model_len, most=config.max_num_seqs)
    except Exception as error:  # the model's code may raise anything
        raise ModelError(
            f"running {type(model).__name__}",
            found=f"{reason}; computing whole sequences fails, too: {error}",
            remedy="this model needs an engine of its own; core.compile takes its forward as it is",
        ) from None
    return WholeForward(model, way), manner, probes


def refuse_cached(model: Any, config: EngineConfig, reason: str) -> None:
    """Raise `UsageError` where the configuration asks for what a model without a cache does not have.

    reason: why it has none.
    """
    asked = {
        f"speculative={config.speculative}": config.speculative,
        f"cache_tokens={config.cache_tokens}": config.cache_tokens,
        f"{num_ranks()} processes that share the model": num_ranks() > 1,
    }
    for what, given in asked.items():
        if given:
            name = type(model).__name__
            found = f"{name} has no cache here ({reason}): each step computes whole sequences, in one process"
            raise UsageError(what, found=found, remedy="leave it out")
