"""The detokenizer: pieces add up to the full decoding for any tokens, and text ends at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from core.engine.serve.detokenize import Detokenizer, StopStrings  # noqa: E402

SPECIAL = ["<s>", "</s>"]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what sentencepiece writes for a space


def byte_level() -> Any:
    """A tokenizer of the GPT-2 kind: every byte is a token, and some tokens are several bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # The merges glue the first two bytes of some characters, so that tokens end in the middle of them.
    merges = [("h", "i"), ("\u0120", "a"), ("ä", "½"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return wrap(tokenizer)


def byte_fallback() -> Any:
    """A tokenizer of the Llama-2 kind: the space at the beginning is dropped, unknown characters become byte tokens."""
    letters = [*"abc.", SPACE, SPACE + "a", SPACE + "b", SPACE * 2, "ö"]
    words = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(SPACE), tokenizers.normalizers.Replace(" ", SPACE)]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer)


def word_piece() -> Any:
    """A tokenizer of the BERT kind: a space before every token but the continuations."""
    words = [*SPECIAL, "[UNK]", "a", "b", "##a", "##b", ".", "'s", "ö", "##ö"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return wrap(tokenizer)


def wrap(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "word_piece": word_piece()}


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class Shouting(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer with a decoding of its own, as some models bring."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


def test_a_class_that_decodes_in_its_own_way_is_asked() -> None:
    own = Shouting(tokenizer_object=TOKENIZERS["word_piece"].backend_tokenizer, bos_token="<s>", eos_token="</s>")
    ids = own.convert_tokens_to_ids(["a", "##b", "b", "."])
    assert "".join(stream(own, ids)) == decode(own, ids) == "AB B ."
    plain = word_piece()
    assert "".join(stream(plain, ids)) == "ab b ."
    plain.decode = own.decode  # of the object alone
    assert "".join(stream(plain, ids)) == "AB B ."


def stream(tokenizer: Any, ids: Sequence[int], **options: Any) -> list[str]:
    """Return one piece for each token, and the flushed one."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Token ids, with whole characters of several bytes among arbitrary ones; a few beyond the vocabulary."""
    tokenizer = TOKENIZERS[name]
    pieces = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ö", "你好", "😀", " a", "hi", "a b.")
    ]
    one = st.integers(0, len(tokenizer) + 2).map(lambda i: [i])
    return st.lists(st.one_of(one, st.sampled_from(pieces)), max_size=25).map(
        lambda parts: [i for p in parts for i in p]
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_add_up_to_the_full_decoding(name: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    ids = data.draw(ids_of(name))
    pieces = stream(TOKENIZERS[name], ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == decode(TOKENIZERS[name], ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_after_a_context_pieces_continue_it(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    context = [*data.draw(ids_of(name)), tokenizer.convert_tokens_to_ids("a")]
    ids = data.draw(ids_of(name))
    assert decode(tokenizer, context) + "".join(stream(tokenizer, ids, context=context)) == decode(
        tokenizer, context + ids
    )


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that is complete first, reading one character at a time."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_text_ends_at_the_first_stop_string(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(name))
    text = decode(tokenizer, ids)
    # Cut from the text itself, or hardly any would ever be met.
    spans = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    stop = [s for s in data.draw(st.lists(st.one_of(spans, st.sampled_from(["a", "hi", " a b"])), max_size=3)) if s]
    detokenizer = Detokenizer(tokenizer, stop=stop)
    pieces = [*(detokenizer.push(i) for i in ids), detokenizer.flush()]
    assert ("".join(pieces), detokenizer.stopped_by) == first_stop(text, stop)


@pytest.mark.slow
@given(
    text=st.text("abc", max_size=30), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), data=st.data()
)
@settings(max_examples=200, deadline=None)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stops = StopStrings(stop)
    pieces = [stops.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert ("".join(pieces) + stops.flush(), stops.found) == first_stop(text, stop)


def test_a_character_is_given_when_its_last_byte_arrives() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer("hi 😀!")["input_ids"]
    pieces = stream(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["hi", " ", "😀", "!"]
    assert pieces[0] == "hi"


def test_text_arrives_with_each_token() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer("a b.c", add_special_tokens=False)["input_ids"]
    assert stream(tokenizer, ids)[:-1] == [
        decode(tokenizer, ids[: n + 1])[len(decode(tokenizer, ids[:n])) :] for n in range(len(ids))
    ]


def test_bytes_that_never_become_a_character_are_given_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer("hi😀")["input_ids"][:-1]
    pieces = stream(tokenizer, ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[:-1])
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"


def test_a_leading_space_is_kept_after_a_context_and_dropped_at_the_beginning() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    token = tokenizer.convert_tokens_to_ids(SPACE + "b")
    context = tokenizer("a", add_special_tokens=False)["input_ids"]
    assert "".join(stream(tokenizer, [token])) == "b"
    assert "".join(stream(tokenizer, [token], context=context)) == " b"


def test_a_special_token_gives_no_text_and_does_not_eat_the_next_space() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    a, b = (tokenizer.convert_tokens_to_ids(SPACE + letter) for letter in "ab")
    assert stream(tokenizer, [a, tokenizer.bos_token_id, b]) == ["a", "", " b", ""]


def test_a_stop_string_over_several_tokens_is_held_back_then_dropped() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=["b.c"])
    pieces = [detokenizer.push(i) for i in tokenizer.convert_tokens_to_ids([*"ab.", *"b.c", "h"])]
    assert pieces == ["a", "", "", "b.", "", "", ""]
    assert (detokenizer.stopped_by, detokenizer.flush()) == ("b.c", "")


def test_a_held_beginning_that_comes_to_nothing_is_given() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(tokenizer, tokenizer.convert_tokens_to_ids([*"ab.", *"d"]), stop=["b.c"]) == ["a", "", "", "b.d", ""]
    assert stream(tokenizer, tokenizer.convert_tokens_to_ids([*"ab."]), stop=["b.c"]) == ["a", "", "", "b."]


def test_a_stop_string_inside_one_token_cuts_it() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(tokenizer, tokenizer.convert_tokens_to_ids(["a", "hi", "b"]), stop=["i"]) == ["a", "h", "", ""]
