"""core/engine/http/token_texts.py: tokens of three kinds of vocabularies, whole characters and parts of some."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.engine.http.token_texts import TokenText, token_texts
from tests.engine.serve.test_detokenize import TOKENIZERS

TEXT = "the cat naïve 東京 🙂"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_bytes_of_all_tokens_are_those_of_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    found = token_texts(tokenizer, ids)
    parts = [found[each] for each in ids]
    assert b"".join(part.data for part in parts).decode().lstrip() == tokenizer.decode(ids).lstrip()
    split = [part for part in parts if part.label.startswith("bytes:")]
    assert split and all("\ufffd" in part.text for part in split)
    assert len({part.label for part in parts}) == len({part.data for part in parts})
    for part in parts:
        assert part in split or part == TokenText(part.label, part.label.encode())


def test_a_space_before_a_word_belongs_to_its_token() -> None:
    tokenizer = TOKENIZERS["word_piece"]
    ids = tokenizer.encode("ab a", add_special_tokens=False)
    assert [token_texts(tokenizer, ids)[each].text for each in ids] == [" a", "b", " a"]


def test_spaces_before_punctuation_stay_whatever_the_tokenizer_would_clean_up() -> None:
    import tokenizers
    import transformers

    vocabulary = [("<unk>", 0.0), *((f"▁{word}", -1.0) for word in ("a", ".", "'s"))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    cleaning = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    assert [each.text for each in token_texts(cleaning, range(1, 4)).values()] == [" a", " .", " 's"]


def test_a_replacement_character_of_the_vocabulary_stands_for_itself() -> None:
    assert TokenText("\ufffd", b"\xef\xbf\xbd").label == "\ufffd"
    assert TokenText("\ufffd", b"\xe6\x9d").label == r"bytes:\xe6\x9d"
