"""Turn generated tokens into text while they arrive, and find the strings at which it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Decoder(Protocol):
    """What a tokenizer must offer; every transformers tokenizer does."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...


class Detokenizer:
    """Decodes one sequence piece by piece.

    The pieces, `flush` included, add up to the tokenizer's decoding of all tokens, without the cosmetic removal of
    spaces before punctuation (which would change text already given), and without a stop string and what follows it. A
    piece may be empty: text is held back while it can still change (the bytes of a character that is not complete), and
    while it may be the beginning of a stop string.

    context: tokens before the first one, such as the last of the prompt, ending with a complete character. Without it
    the first token is decoded as the beginning of a text, where many tokenizers drop a leading space; with it, as a
    continuation.

    The window of tokens that is decoded again for each piece follows the incremental decoding of Hugging Face's
    text-generation-inference: a tokenizer decides about spaces by the token before, so that tokens are never decoded
    alone.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._text = _decoding(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = StopStrings(stop)
        # Tokens already decoded, kept as context for later ones; and tokens that wait.
        self._given = list(context)
        self._given_text = self._decode(self._given)
        self._waiting: list[int] = []
        self._in_byte_run = False
        self._last_text = self._given_text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop.found

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now final; "" once a stop string was found."""
        if self._stop.found is not None:
            return ""
        self._waiting.append(token_id)
        text = self._decode(self._given + self._waiting)
        if self._may_change(text, token_id):
            return ""
        return self._give(text)

    def flush(self) -> str:
        """End the sequence and return the text that was still held back."""
        if self._stop.found is not None:
            return ""
        piece = self._give(self._decode(self._given + self._waiting)) if self._waiting else ""
        return piece + self._stop.flush()

    def _may_change(self, text: str, token_id: int) -> bool:
        # A run of byte tokens becomes text as a whole: one bad byte turns even the good characters before it into
        # replacement characters. A token without text of its own (a special one) does not end the run.
        if BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or ""):
            self._in_byte_run = True
        elif text != self._last_text:
            self._in_byte_run = False
        self._last_text = text
        return self._in_byte_run or len(text) <= len(self._given_text) or text.endswith(REPLACEMENT)

    def _give(self, text: str) -> str:
        new = text[len(self._given_text) :]
        self._given, self._waiting = self._waiting, []
        self._given_text = self._last_text = self._decode(self._given)
        return self._stop.push(new)

    def _decode(self, token_ids: list[int]) -> str:
        return self._text(token_ids) if token_ids else ""


def _decoding(tokenizer: Decoder, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return a tokenizer's `decode`: that of the tokenizers library itself, unless its class or it changes something.

    The way there takes longer than the decoding, twice per token of each sequence.
    """
    from transformers import PreTrainedTokenizerFast

    own, fast, names = type(tokenizer), cast("Any", PreTrainedTokenizerFast), {"decode", "_decode"}
    unchanged = not names & getattr(tokenizer, "__dict__", {}).keys() and all(
        getattr(own, n, 0) is getattr(fast, n) for n in names
    )
    if isinstance(tokenizer, fast) and unchanged:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class StopStrings:
    """Passes text up to the first stop string, however it is cut into pieces.

    The first is the stop string that is complete first; among several that end at the same character, the longest. Its
    own text is held back. Raises nothing; an empty stop string is refused by SamplingParams.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take the next text and return what can no longer be part of a stop string; "" once one was found."""
        if self.found is not None or not self._stop:
            return "" if self.found is not None else text
        self._held += text
        matches = [(start + len(s), start, s) for s in self._stop if (start := self._held.find(s)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            piece, self._held = self._held[:start], ""
            return piece
        keep = len(self._held) - self._num_undecided()
        piece, self._held = self._held[:keep], self._held[keep:]
        return piece

    def flush(self) -> str:
        """Return the text that was held back and did not become a stop string."""
        piece, self._held = self._held, ""
        return piece

    def _num_undecided(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0
