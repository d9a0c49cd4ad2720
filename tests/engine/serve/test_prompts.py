"""Prompts: encoding, the bound on generation, and one error for each prompt that cannot be used."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")

from core.engine.config import SamplingParams  # noqa: E402
from core.engine.models.loading import LoadedModel, build_model  # noqa: E402
from core.engine.serve.prompts import EncodedPrompt, as_prompts, encode_prompt, encode_prompts  # noqa: E402
from core.errors import ModelError, UsageError  # noqa: E402

CONTEXT = 16
PARAMS = SamplingParams(max_new_tokens=4)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A model of 40 tokens and 16 positions whose tokenizer starts each text with `<s>` and knows the letters."""
    words = ["<s>", *map(chr, range(ord("a"), ord("z") + 1))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["token{outside}"] + [f"token{{{i}}}" for i in range(30)])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        vocab_size=40,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    built = build_model(config, torch_device=torch.device("cpu"))
    return dataclasses.replace(built, tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def error_of(prompt: Any, loaded: LoadedModel, params: SamplingParams = PARAMS, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        encode_prompt(prompt, loaded, params, **options)
    assert caught.value.asked.startswith("encode the prompt ")
    return caught.value


def test_a_text_gets_the_special_tokens_and_ids_do_not(loaded: LoadedModel) -> None:
    assert encode_prompt("abc", loaded, PARAMS) == EncodedPrompt(token_ids=(0, 1, 2, 3), max_new_tokens=4)
    assert encode_prompt([1, 2, 3], loaded, PARAMS) == EncodedPrompt(token_ids=(1, 2, 3), max_new_tokens=4)
    assert len(encode_prompt((5,), loaded, PARAMS)) == 1


def test_several_prompts_are_encoded_in_order(loaded: LoadedModel) -> None:
    encoded = encode_prompts(["ab", [7]], loaded, [PARAMS, SamplingParams(max_new_tokens=9)])
    assert [(e.token_ids, e.max_new_tokens) for e in encoded] == [((0, 1, 2), 4), ((7,), 9)]


def test_several_prompts_need_as_many_parameters(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="sampling parameters for 1"):
        encode_prompts(["a", "b"], loaded, [PARAMS])
    with pytest.raises(UsageError, match="a single string"):
        encode_prompts("ab", loaded, [PARAMS, PARAMS])


@pytest.mark.parametrize("num_tokens", [1, 11, 12, 13, 15])
def test_generation_is_bounded_by_the_context(loaded: LoadedModel, num_tokens: int) -> None:
    encoded = encode_prompt([3] * num_tokens, loaded, PARAMS)
    assert encoded.max_new_tokens == min(4, CONTEXT - num_tokens)
    assert encoded.bounded == (num_tokens > 12)


def test_a_prompt_without_room_for_a_token_states_tokens_and_limit(loaded: LoadedModel) -> None:
    error = error_of([3] * CONTEXT, loaded)
    assert error.found == "it has 16 tokens; the context holds 16, of which one must stay free"
    assert "at most 15 tokens" in error.remedy
    assert "it has 41 tokens" in error_of("a" * 40, loaded).found


def test_the_room_of_the_engine_counts_too(loaded: LoadedModel) -> None:
    assert encode_prompt([3, 3], loaded, PARAMS, max_context=5).max_new_tokens == 3
    assert "the context holds 5" in error_of([3] * 5, loaded, max_context=5).found
    assert encode_prompt([3] * 15, loaded, PARAMS, max_context=1000).max_new_tokens == 1


def test_without_any_limit_nothing_is_bounded(loaded: LoadedModel) -> None:
    endless = dataclasses.replace(loaded, max_position=None)
    encoded = encode_prompt([3] * 500, endless, SamplingParams(max_new_tokens=10_000))
    assert (encoded.max_new_tokens, encoded.bounded) == (10_000, False)


def test_an_empty_prompt(loaded: LoadedModel) -> None:
    assert error_of("", loaded).found == "it is empty"
    assert error_of([], loaded).found == "it has no tokens"
    for nothing in (torch.zeros(0, dtype=torch.long), np.zeros(0, dtype=np.int64)):
        assert as_prompts(nothing) == as_prompts([[]]) == as_prompts([nothing]) == [[]]
    assert as_prompts([]) == as_prompts(torch.zeros(0, 3)) == []


def test_a_text_that_the_tokenizer_drops(loaded: LoadedModel) -> None:
    bare = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    model = dataclasses.replace(loaded, tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=bare))
    assert error_of("!!", model).found == "the tokenizer made no token of it"


@pytest.mark.parametrize(
    ("ids", "token", "position"),
    [([1, 40], 40, 1), ([-1], -1, 0), ([2, 3, 999, 41], 999, 2), ([3, 2**70], 2**70, 1), ([5, 50, -(2**64)], 50, 1)],
)
def test_an_id_outside_the_vocabulary(loaded: LoadedModel, ids: list[int], token: int, position: int) -> None:
    found = error_of(ids, loaded).found
    assert found == f"token id {token} at position {position} is outside the vocabulary, 0 to 39"


def test_a_tokenizer_that_knows_more_tokens_than_the_model(loaded: LoadedModel) -> None:
    error = error_of("atoken{29}", loaded)
    assert "the model knows 0 to 39" in error.found
    assert "one and the same model" in error.remedy


@pytest.mark.parametrize(
    "prompt",
    [[1.5], ["a"], [True], [None], 7, torch.tensor([1, 2]), np.array([1, 2]), [1, np.int64(2)], [1, 2, 3, False], b"a"],
)
def test_a_prompt_of_another_type_is_a_usage_error(loaded: LoadedModel, prompt: Any) -> None:
    with pytest.raises(UsageError, match="neither a text nor a list of ints"):
        encode_prompt(prompt, loaded, PARAMS)


def test_any_sequence_of_ints_is_taken(loaded: LoadedModel) -> None:
    class Token(enum.IntEnum):
        FIRST = 7

    for prompt, ids in (([Token.FIRST, 3], (7, 3)), (range(2, 5), (2, 3, 4)), ((39,), (39,))):
        encoded = encode_prompt(prompt, loaded, PARAMS)
        assert encoded.token_ids == ids and encoded.array is not None
        assert encoded.array.dtype == np.int64 and tuple(encoded.array.tolist()) == ids


def test_a_text_needs_a_tokenizer_and_ids_do_not(loaded: LoadedModel) -> None:
    without = dataclasses.replace(loaded, tokenizer=None)
    assert encode_prompt([3], without, PARAMS).token_ids == (3,)
    with pytest.raises(ModelError, match="has no tokenizer"):
        encode_prompt("a", without, PARAMS)


def test_a_long_prompt_is_cut_in_the_message(loaded: LoadedModel) -> None:
    assert len(error_of("a" * 100_000, loaded).asked) < 80
