"""Turns prompts into token ids that the model can take, and limits how many tokens may follow."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np

from core.common.given import check_names, made_of
from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel
from core.engine.serve.chat import apply_template, is_chat
from core.engine.steps.sampling import make_generator
from core.engine.steps.sequence import Sequence as EngineSequence
from core.errors import ModelError, UsageError

log = logging.getLogger("core.engine")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text; token ids that are taken as they are, with no special token added; or the messages of a chat."""


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt as token ids, with the number of tokens that may follow."""

    token_ids: tuple[int, ...]
    #: The number asked for, or fewer where the context ends before; after so many the finish reason is "length".
    max_new_tokens: int
    #: Whether the context allows fewer tokens than were asked for.
    bounded: bool = False
    #: The token ids as int64, where they were checked as such.
    array: np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    def sequence(self, index: int, params: SamplingParams) -> EngineSequence:
        """Return a new sequence of that index with this prompt and its limit on new tokens."""
        if self.max_new_tokens != params.max_new_tokens:
            params = replace(params, max_new_tokens=self.max_new_tokens)
        return EngineSequence(index, list(self.token_ids), params, make_generator(params), array=self.array)


def one_each(what: str, given: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return one name for each prompt: the one given for all, or theirs. Raises `UsageError` for another number."""
    names = [given] * count if given is None or isinstance(given, str) else list(given)
    if len(names) != count:
        raise UsageError(
            f"generate for {count} prompts",
            found=f"{len(names)} {what} are named",
            remedy="name one for all, or one for each prompt, None for those without",
        )
    return names


def as_prompts(given: Any) -> list[Prompt]:
    """Return the prompts that were given: a text, a list of token ids and a chat are lists of one.

    Arrays and tensors of token ids are lists of them; of two dimensions, a row is a prompt. Raises `UsageError` for
    what can't be prompts. Whether the model can take each is for `encode_prompts` to say.
    """
    is_row, given = len(getattr(given, "shape", ())) == 1, _plain(given)
    if isinstance(given, str) or is_chat(given):
        return [given]
    if isinstance(given, bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        raise UsageError(
            f"generate for {given!r:.60}",
            found=f"{type(given).__name__}, which is no prompt",
            remedy="pass a str, a list of token ids, messages of a chat, or a list of such",
        )
    prompts = [_plain(each) for each in given]
    ints = all(isinstance(each, int) and not isinstance(each, bool) for each in prompts)
    # A list of nothing is no prompts, a row of no ids is an empty prompt.
    return [prompts] if ints and (prompts or is_row) else prompts


def as_params(given: Any, num_prompts: int, settings: Mapping[str, Any]) -> list[SamplingParams]:
    """Return parameters for each prompt: one for all, or theirs; made of `settings` where only these are given.

    Raises `UsageError` for both, for a setting that there is not, and for anything but a `SamplingParams` or a mapping.
    """
    if settings:
        check_names(settings, [item.name for item in fields(SamplingParams)], "of generate")
        if given is not None:
            raise UsageError(
                f"generate with params and {', '.join(settings)}",
                found="both say how tokens are chosen",
                remedy="write all of it into SamplingParams(…)",
            )
        return [SamplingParams(**settings)] * num_prompts
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [params_of(each) for each in given]
    return [params_of(given)] * num_prompts


def params_of(given: Any) -> SamplingParams:
    """Return the parameters of one request; None stands for the defaults, a mapping for its fields."""
    return SamplingParams() if given is None else made_of(SamplingParams, given, "params")


def _plain(given: Any) -> Any:
    """Return the numbers of a tensor or an array, and anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") and hasattr(given, "shape") else given


def encode_prompts(
    prompts: Sequence[Prompt],
    loaded: LoadedModel,
    params: Sequence[SamplingParams],
    *,
    max_context: int | None = None,
) -> list[EncodedPrompt]:
    """Encode each prompt, and say how many can get fewer tokens than they ask for; see `encode_prompt`."""
    if isinstance(prompts, str):
        raise UsageError(
            f"encode {len(prompts)} prompts", found="a single string was passed", remedy="pass a list of prompts"
        )
    if len(prompts) != len(params):
        raise UsageError(
            f"encode {len(prompts)} prompts",
            found=f"there are sampling parameters for {len(params)}",
            remedy="pass one SamplingParams for each prompt",
        )
    encoded = [
        encode_prompt(prompt, loaded, p, max_context=max_context) for prompt, p in zip(prompts, params, strict=True)
    ]
    if num_short := sum(prompt.bounded for prompt in encoded):
        log.warning(
            "%d of %d prompts can get fewer new tokens than max_new_tokens asks: the context holds %d",
            num_short,
            len(encoded),
            min(_limits(loaded, max_context)),
        )
    return encoded


def encode_prompt(
    prompt: Prompt, loaded: LoadedModel, params: SamplingParams, *, max_context: int | None = None
) -> EncodedPrompt:
    """Encode one prompt, with the special tokens that the tokenizer puts around a text.

    The context is the smaller of the model's `max_position` and `max_context` (what an engine has room for); prompt and
    generated tokens together never exceed it. Raises ModelError for a prompt that is empty, leaves no room for one new
    token, holds an id outside the vocabulary, or is a text where there is no tokenizer.
    """
    array = None
    if isinstance(prompt, str):
        token_ids = _encode_text(prompt, loaded)
    elif is_chat(prompt):
        token_ids, array = _check_ids(apply_template(prompt, loaded), loaded.vocab_size)
    else:
        token_ids, array = _check_ids(cast("Sequence[int]", prompt), loaded.vocab_size)
    limits = _limits(loaded, max_context)
    if not limits:
        return EncodedPrompt(token_ids=token_ids, max_new_tokens=params.max_new_tokens, array=array)
    room = min(limits) - len(token_ids)
    if room < 1:
        raise ModelError(
            f"encode the prompt {_shown(prompt)}",
            found=f"it has {len(token_ids)} tokens; the context holds {min(limits)}, of which one must stay free",
            remedy=f"shorten the prompt to at most {min(limits) - 1} tokens, or use a model with a longer context",
        )
    return EncodedPrompt(
        token_ids=token_ids,
        max_new_tokens=min(params.max_new_tokens, room),
        bounded=room < params.max_new_tokens,
        array=array,
    )


def _limits(loaded: LoadedModel, max_context: int | None) -> list[int]:
    return [limit for limit in (loaded.max_position, max_context) if limit is not None]


def _encode_text(text: str, loaded: LoadedModel) -> tuple[int, ...]:
    asked = f"encode the prompt {_shown(text)}"
    if not text:
        raise ModelError(asked, found="it is empty", remedy="pass at least one character, or the id of a start token")
    tokenizer = loaded.require_tokenizer()
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ModelError(asked, found="it holds half of a surrogate pair", remedy="pass text that UTF-8 can write")
    # verbose=False: the tokenizer's own warning about long texts; the length is judged here.
    token_ids = tuple(int(i) for i in tokenizer(text, verbose=False)["input_ids"])
    if not token_ids:
        raise ModelError(
            asked, found="the tokenizer made no token of it", remedy="pass another text, or a list of token ids"
        )
    outside = [i for i in token_ids if i >= loaded.vocab_size]
    if outside:
        raise ModelError(
            asked,
            found=f"the tokenizer made token {outside[0]}; the model knows 0 to {loaded.vocab_size - 1}",
            remedy="use the tokenizer files and the weights of one and the same model",
        )
    return token_ids


def _check_ids(prompt: Sequence[int], vocab_size: int) -> tuple[tuple[int, ...], np.ndarray[Any, Any]]:
    """Return the ids as they are and as an array. A prompt may hold many thousands: no line of Python runs for each."""
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence) or not _are_ints(prompt):
        raise UsageError(
            f"encode the prompt {_shown(prompt)}",
            found=f"a {type(prompt).__name__} that is neither a text nor a list of ints",
            remedy="pass a str, list[int], or messages: [{'role': 'user', 'content': 'Hello'}]",
        )
    if not prompt:
        raise ModelError(
            f"encode the prompt {_shown(prompt)}", found="it has no tokens", remedy="pass at least one token id"
        )
    try:
        array = np.fromiter(prompt, dtype=np.int64, count=len(prompt))
        fits = bool(array.min() >= 0 and array.max() < vocab_size)
    except OverflowError:  # an id of more than 64 bits
        fits = False
    if not fits:
        position, token_id = next((at, i) for at, i in enumerate(prompt) if not 0 <= i < vocab_size)
        raise ModelError(
            f"encode the prompt {_shown(prompt)}",
            found=f"token id {token_id} at position {position} is outside the vocabulary, 0 to {vocab_size - 1}",
            remedy="encode the prompt with the tokenizer of this model",
        )
    return tuple(prompt), array


def _are_ints(prompt: Sequence[object]) -> bool:
    """Tell whether all are ints; a bool does not count as one."""
    types = list(map(type, prompt))
    if types.count(int) == len(types):
        return True
    return all(issubclass(each, int) and each is not bool for each in set(types))


def _shown(prompt: object, limit: int = 40) -> str:
    text = repr(prompt[: limit + 1] if isinstance(prompt, str | list | tuple) else prompt)
    return text if len(text) <= limit else f"{text[:limit]}..."
