"""What drafts beside the served model, a smaller model or a head: read, compared with it, compiled in the same room."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from core.compilation.options import Progress
from core.device import Device
from core.engine.heads.head import Head
from core.engine.heads.loading import load_head
from core.engine.inspect.attention import NotPageable
from core.engine.models.loading import LoadedModel, load_model
from core.engine.paged.model import PagedModel
from core.engine.paged.room import Place, Room
from core.engine.paged.runner import PagedRunner
from core.engine.steps.draft_head import DraftHead
from core.engine.steps.draft_model import CATCH_UP, DraftModel
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError


def load_draft(
    loaded: LoadedModel, device: Device, config: EngineConfig, *, max_model_len: int, progress: Progress | None
) -> LoadedModel | None:
    """Return the draft model or the head that was asked for, in the served model's dtype; None where none was.

    Raises `UsageError` where it can't draft for `loaded`: another vocabulary, or a context shorter than max_model_len;
    and as `load_head` and `load_model` do.
    """
    draft = config.draft_model
    if draft is None:
        return None
    if not isinstance(draft, LoadedModel):
        with torch.inference_mode(False):  # as the served model's weights
            head = load_head(draft, loaded)
            if head is not None:
                return head
            draft = load_model(
                draft,
                torch_device=device.torch_device,
                dtype=loaded.dtype,
                progress=progress,
                copy_in=device.parts.copy_in,
            )
    found, remedy = _unlike(loaded, draft), "take a draft model of the same tokenizer"
    if draft.model is loaded.model:
        found, remedy = "it is the served model itself, which has one cache", "load it once more"
    elif draft.max_position is not None and draft.max_position < max_model_len:
        found = f"it has {draft.max_position} positions, and sequences here have up to {max_model_len}"
        remedy = f"ask for max_model_len={draft.max_position}, or take another draft model"
    if found:
        raise _refusal(draft, loaded, found, remedy)
    return draft


def run_with_draft(
    loaded: LoadedModel,
    draft: LoadedModel,
    device: Device,
    config: EngineConfig,
    *,
    max_model_len: int,
    progress: Progress | None,
) -> tuple[PagedRunner, DraftModel]:
    """Compile both models on one set of block tables; raise `NotPageable` where the served one can't run there.

    Raises `UsageError` where the draft model can't, and where either keeps recurrent states.
    """
    head = draft.model if isinstance(draft.model, Head) else None
    # What drafts verifies nothing: its phase of that name computes what it lacks before a draft. A head lacks what the
    # served model has verified.
    lacks = CATCH_UP - 1 if head is None else config.speculative
    own = replace(config, draft_model=None, speculative=lacks, kv_cache_dtype="auto")
    served = PagedModel(loaded.model, device, config, max_model_len=max_model_len)
    if served.recurrence.layers:
        found = "the served model keeps recurrent states, from which a wrong draft can't be taken back"
        raise _refusal(draft, loaded, found, "leave the draft model out")
    state_bytes = 0 if head is None else head.state_size * draft.dtype.itemsize
    try:
        second = PagedModel(draft.model, device, own, max_model_len=max_model_len, state_bytes=state_bytes)
    except NotPageable as refusal:
        raise _unpageable(draft, loaded, str(refusal)) from None
    if second.recurrence.layers:
        found = "it keeps recurrent states, from which its own wrong drafts can't be taken back"
        raise _refusal(draft, loaded, found, "take another draft model")
    room = Room([served, second], device, config, max_model_len=max_model_len, looks_ahead=head is not None)
    states = None if head is None else room.make_states(second, head.state_size, draft.dtype)
    more: dict[str, Any] = {"max_model_len": max_model_len, "progress": progress}
    with ExitStack() as stack:
        if head is not None and states is not None:
            head.attach(loaded.model, states)
            stack.callback(head.detach)
        runner = PagedRunner(loaded.model, device, config, place=Place(served, room, states=states), **more)
        stack.callback(runner.close)
        if states is not None:
            states.rows.fill_(1.0)  # as the head's own forward has it, with which it is compared
        try:
            place = Place(second, room, drafts=True, states=states)
            drafts = PagedRunner(draft.model, device, own, place=place, **more)
        except NotPageable as refusal:
            raise _unpageable(draft, loaded, str(refusal)) from None
        stack.pop_all()
    if head is not None:
        return runner, DraftHead(drafts, vocab_size=draft.vocab_size, num_drafts=config.speculative, detach=head.detach)
    return runner, DraftModel(drafts, vocab_size=draft.vocab_size, target_vocab_size=loaded.vocab_size)


def _unlike(loaded: LoadedModel, draft: LoadedModel) -> str:
    """Return how the vocabularies differ; "" if every token id means the same to both models.

    Models of one tokenizer may pad their embeddings to different sizes.
    """
    if loaded.tokenizer is not None and draft.tokenizer is not None:
        ours, theirs = loaded.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
        other = next((token for token, index in ours.items() if theirs.get(token) != index), None)
        if other is not None:
            return f"the token {other!r} is {ours[other]} to the served model and {theirs.get(other)} to this one"
        return "" if len(ours) == len(theirs) else f"it has {len(theirs)} tokens, the served model {len(ours)}"
    if loaded.vocab_size != draft.vocab_size:
        return f"it has {draft.vocab_size} tokens, the served model {loaded.vocab_size}"
    return ""


def _refusal(draft: LoadedModel, loaded: LoadedModel, found: str, remedy: str) -> UsageError:
    where = "" if draft.path is None else f" of {str(draft.path)!r}"
    asked = f"drafts of a {type(draft.model).__name__}{where} for a {type(loaded.model).__name__}"
    return UsageError(asked, found=found, remedy=remedy)


def _unpageable(draft: LoadedModel, loaded: LoadedModel, reason: str) -> UsageError:
    return _refusal(draft, loaded, f"it can't run on the paged cache: {reason}", "take another draft model")
