"""Which cache a model runs on: the paged one, transformers' own, or none; and which models open engines serve."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from core.compilation.options import Progress
from core.device import Device
from core.engine.inspect.attention import NotPageable
from core.engine.models.loading import LoadedModel
from core.engine.paged.runner import PagedRunner
from core.engine.parallel.agreement import agree
from core.engine.recompute.opening import COST
from core.engine.recompute.runner import RecomputeRunner
from core.engine.serve.agreeing import after_compiling, before_compiling
from core.engine.serve.drafting import run_with_draft
from core.engine.static.runner import StaticRunner
from core.engine.steps.drafts import Drafter, OwnText
from core.engine.steps.model_runner import ModelRunner
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sleeper import Sleeper
from core.errors import ModelError, UsageError

log = logging.getLogger("core.engine")
SERVED: WeakSet[nn.Module] = WeakSet()
"""The models of open engines: each has one engine at most, which changes its attention."""


def make_runner(
    loaded: LoadedModel,
    draft: LoadedModel | None,
    device: Device,
    config: EngineConfig,
    *,
    max_model_len: int,
    progress: Progress | None,
    sleeper: Sleeper | None = None,
) -> tuple[ModelRunner, Drafter]:
    """Return the compiled model on the paged cache, or, with a warning that says why, on transformers' static cache, or
    without a cache; and what drafts for it, by the draft model where there is one.

    Raises `UsageError` for a model that an open engine serves, and where a model can't have the paged cache and the
    configuration asks for what that alone has, or ranks differ in what they compile. sleeper: moves weights and cache
    before they are captured.
    """
    models = [each.model for each in (loaded, draft) if each is not None]
    taken = next((model for model in models if model in SERVED), None)
    if taken is not None:
        raise UsageError(
            f"an engine for {type(taken).__name__}",
            found="the model is served by another engine",
            remedy="close that one first, or load the model once more",
        )
    with torch.inference_mode(False):  # inference mode would forbid later writes to the cache
        agree("what to compile", lambda: before_compiling(loaded, device, config, max_model_len=max_model_len))
        how: Any = {"max_model_len": max_model_len, "progress": progress}
        made = _make(loaded, draft, device, config, sleeper, how)
        agree("what was compiled", lambda: after_compiling(made[0].report()))
    SERVED.update(models)
    return made


def _make(
    loaded: LoadedModel,
    draft: LoadedModel | None,
    device: Device,
    config: EngineConfig,
    sleeper: Sleeper | None,
    how: Any,
) -> tuple[ModelRunner, Drafter]:
    model = loaded.model
    try:
        if draft is not None:
            return run_with_draft(loaded, draft, device, config, **how)
        runner = PagedRunner(model, device, config, sleeper=sleeper, **how)
        if runner.unserved:
            runner.close()
            raise NotPageable(runner.unserved)
        return runner, OwnText()
    except NotPageable as refusal:
        # Pass the error as text: a handler that keeps records would keep the model alive through the error's frames.
        reason = str(refusal)
        if config.max_loras:
            raise UsageError(
                f"max_loras={config.max_loras}",
                found=f"{type(model).__name__} can't run on the paged cache, where alone adapters are: {reason}",
                remedy="take max_loras=0, and serve the adapter merged into the model",
            ) from None
        if config.deterministic is not None:
            raise UsageError(
                f"deterministic={config.deterministic!r}",
                found=f"{type(model).__name__} can't run on the paged cache, which alone is batch-invariant: {reason}",
                remedy="leave it out",
            ) from None
        if config.kv_cache_dtype != "auto":
            raise UsageError(
                f"a key/value cache of {config.kv_cache_dtype!r}",
                found=f"{type(model).__name__} can't run on the paged cache, which alone has it: {reason}",
                remedy='take kv_cache_dtype="auto"',
            ) from None
        if draft is not None:
            raise UsageError(
                f"drafts of a {type(draft.model).__name__}",
                found=f"{type(model).__name__} can't run on the paged cache, which alone takes drafts back: {reason}",
                remedy="leave the draft model out",
            ) from None
        log.warning("no paged cache: %s; using transformers' static cache", reason)
    try:
        return StaticRunner(model, device, config, reason=reason, sleeper=sleeper, **how), OwnText()
    except ModelError as refusal:
        reason = refusal.found
    log.warning("no cache: %s; %s", reason, COST)
    return RecomputeRunner(model, device, config, reason=reason, sleeper=sleeper, **how), OwnText()
