"""What single tokens stand for, as text and as bytes: a token may be a part of a character alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from core.engine.serve.detokenize import BYTE_TOKEN, REPLACEMENT


class TokenText(NamedTuple):
    """What a token adds to a text that goes before it."""

    #: with a replacement character where its bytes are no whole characters
    text: str
    #: of the text in UTF-8; of a part of a character that part
    data: bytes

    @property
    def label(self) -> str:
        """The text, or what OpenAI's completions have for bytes that are none, which tells two such tokens apart."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> Mapping[int, TokenText]:
    """Return what each of these tokens stands for behind other text, special ones included.

    tokenizer: of transformers. Many drop the space of a token that begins a text, so each is decoded behind another.
    """
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    known = decode(before)

    def found(token_id: int) -> TokenText:
        text = decode([*before, token_id])
        text = text[len(known) :] if text.startswith(known) else decode([token_id])
        return TokenText(text, _bytes(tokenizer.convert_ids_to_tokens(token_id) or "", text))

    return {each: found(each) for each in token_ids}


def _bytes(token: str, text: str) -> bytes:
    """Return the bytes of a token of the vocabulary that decodes to this text."""
    if REPLACEMENT not in text:
        return text.encode(errors="replace")
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:-1], 16)])
    table = _byte_level()
    return bytes(map(table.__getitem__, token)) if table.keys() >= set(token) else text.encode()


@cache
def _byte_level() -> Mapping[str, int]:
    """Return the byte for which each character stands in the vocabularies of byte-level tokenizers, GPT-2's table."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
