"""Messages of a chat as token ids, by the template that comes with the model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jinja2

from core.engine.models.loading import LoadedModel
from core.errors import ModelError


def is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Tell whether a prompt is a list of messages rather than text or token ids."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and all(isinstance(each, Mapping) for each in prompt)


def apply_template(messages: Sequence[Mapping[str, Any]], loaded: LoadedModel) -> list[int]:
    """Return the token ids of a chat up to where the answer begins; special tokens are the template's own.

    messages: what the template knows, at least `role` and `content`. Raises `ModelError` where the tokenizer brings no
    template, and with the template's own words where it refuses the messages.
    """
    tokenizer = loaded.require_tokenizer()
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(
            f"encode a chat of {len(messages)} messages",
            found="the tokenizer has no chat template",
            remedy="pass a text instead (over HTTP by /v1/completions), or use a model that was trained for chats",
        )
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        # Templates run what they are given: a message of the wrong shape fails in the middle of one.
        raise ModelError(
            f"encode a chat of {len(messages)} messages",
            found=f"its template refuses it: {' '.join(str(error).split())[:300]}",
            remedy="pass messages as the model's template wants them, for example "
            "[{'role': 'user', 'content': 'Hello'}]",
        ) from error
    return [int(each) for each in ids]
