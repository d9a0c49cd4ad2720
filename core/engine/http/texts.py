"""Text to tokens and back in a thread of its own: a long prompt holds up neither the event loop nor the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from core.engine.config import SamplingParams
from core.engine.http.token_texts import TokenText, token_texts
from core.engine.models.loading import LoadedModel
from core.engine.serve.grammar import constraint
from core.engine.serve.prompts import EncodedPrompt, Prompt, encode_prompt

T = TypeVar("T")


class Texts:
    """A tokenizer of its own, since one tokenizer must not be set up in one thread and used in another."""

    def __init__(self, loaded: LoadedModel, max_model_len: int) -> None:
        self._loaded = replace(loaded, tokenizer=copy.deepcopy(loaded.tokenizer))
        self._max_model_len = max_model_len
        self._names: dict[int, TokenText] = {}  # no more than the vocabulary
        self._thread = ThreadPoolExecutor(1, "core-text")

    @property
    def vocab_size(self) -> int:
        """A token id is below it."""
        return self._loaded.vocab_size

    async def encode(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[EncodedPrompt]:
        """Return the prompts as token ids, with what the context leaves for new ones; raises as `encode_prompt`."""
        return await self._run(
            lambda: [encode_prompt(each, self._loaded, params, max_context=self._max_model_len) for each in prompts]
        )

    async def check_grammar(self, params: SamplingParams) -> None:
        """Compile what the answer has to match, so that the engine finds it compiled; raises as `constraint`."""
        if params.json_schema is not None or params.regex is not None:
            await self._run(lambda: constraint(self._loaded, params))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; `ModelError` without a tokenizer."""
        return await self._run(
            lambda: str(
                self._loaded.require_tokenizer().decode(
                    list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )
        )

    async def names(self, token_ids: Iterable[int]) -> Mapping[int, TokenText]:
        """Return at least these tokens with what each stands for; `ModelError` without a tokenizer."""
        missing = [each for each in set(token_ids) if each not in self._names]
        if missing:
            tokenizer = self._loaded.require_tokenizer()
            self._names |= await self._run(lambda: token_texts(tokenizer, missing))
        return self._names

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
