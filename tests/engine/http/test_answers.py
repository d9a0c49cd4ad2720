"""What the server answers, asked by OpenAI's own client: the tokens are those of the engine without a server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from core.engine.http.protocol import CompletionRequest
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from tests.engine.http.serving import CONFIG, TEXTS, Served, events, offline

GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[str, Completion]:
    """What the engine gives each text alone; made before a server has the engine."""
    return {text: offline(engine, text, 12, ignore_eos=True) for text in TEXTS}


@pytest.fixture(scope="module")
def sampled(engine: Engine) -> list[Completion]:
    """Three seeds of one text."""
    params = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "ignore_eos": True}
    return [offline(engine, TEXTS[0], 12, seed=seed, **params) for seed in (7, 8, 9)]


@pytest.fixture(scope="module")
def answered(engine: Engine) -> Completion:
    """The chat, offline."""
    return offline(engine, CHAT, 12, ignore_eos=True)


@pytest.fixture(scope="module")
def shaped(engine: Engine) -> Completion:
    """One text with penalties."""
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_tokens": 3}
    return offline(engine, TEXTS[3], 12, ignore_eos=True, logit_bias=((300, 1.5),), **penalties)


# The fixtures above use the engine, so they come before the server.
pytestmark = pytest.mark.usefixtures("expected", "sampled", "answered", "shaped", "served")


@pytest.mark.parametrize("text", TEXTS[:2])
def test_a_completion_is_the_engines(served: Served, expected: dict[str, Completion], text: str) -> None:
    answer = served.openai.completions.create(prompt=text, max_tokens=12, **GREEDY)
    (choice,) = answer.choices
    wanted = expected[text]
    assert (choice.text, choice.finish_reason) == (wanted.text, "length")
    assert choice.model_extra is not None and choice.model_extra["token_ids"] == list(wanted.token_ids)
    assert answer.usage is not None and answer.id.startswith("cmpl-") and answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids) and answer.usage.completion_tokens == 12


def test_a_stream_gives_the_same_tokens_one_by_one_with_usage(served: Served, expected: dict[str, Completion]) -> None:
    options: Any = {"include_usage": True}
    stream = served.openai.completions.create(
        prompt=TEXTS[0], max_tokens=12, stream=True, stream_options=options, **GREEDY
    )
    chunks = list(stream)
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    wanted = expected[TEXTS[0]]
    assert "".join(piece.text for piece in pieces) == wanted.text
    assert [token for piece in pieces for token in (piece.model_extra or {})["token_ids"]] == list(wanted.token_ids)
    assert len(pieces) > 3 and [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.slow
def test_several_prompts_give_a_choice_each_in_their_order(served: Served, expected: dict[str, Completion]) -> None:
    ids = list(expected[TEXTS[2]].prompt_token_ids)
    answer = served.openai.completions.create(prompt=TEXTS, max_tokens=12, **GREEDY)
    assert [choice.text for choice in answer.choices] == [expected[text].text for text in TEXTS]
    assert answer.usage is not None and answer.usage.completion_tokens == 48
    by_ids = served.openai.completions.create(prompt=[ids, ids], max_tokens=12, **GREEDY)
    assert [choice.text for choice in by_ids.choices] == [expected[TEXTS[2]].text] * 2


@pytest.mark.cases(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usage_counts_the_prompt_tokens_that_the_cache_held(served: Served, kind: str, stream: bool) -> None:
    """Nobody sent this text before; later, all full blocks before the last token are there."""
    text = f"Once {kind} was {'streamed' if stream else 'whole'}, and then " + "one and two and three and " * 3
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def usage(prompts: int = 1, n: int = 1) -> Any:
        if kind == "chat":
            messages: Any = [{"role": "user", "content": text}]
            made: Any = served.openai.chat.completions.create(messages=messages, max_tokens=2, n=n, **options, **GREEDY)
        else:
            made = served.openai.completions.create(prompt=[text] * prompts, max_tokens=2, n=n, **options, **GREEDY)
        return (list(made)[-1] if stream else made).usage

    first, second, several = usage(), usage(), usage(n=3)
    block, count = CONFIG.block_size, first.prompt_tokens
    whole = (count - 1) // block * block
    assert count > 2 * block and first.prompt_tokens_details.cached_tokens < block
    # Of several choices, a prompt counts once.
    for again in (second, several):
        assert again.prompt_tokens == count and again.prompt_tokens_details.cached_tokens == whole
    if kind == "completion":
        assert usage(prompts=2).prompt_tokens_details.cached_tokens == 2 * whole


@pytest.mark.parametrize("stream", [False, True])
def test_choice_i_of_n_has_the_seed_plus_i(served: Served, sampled: list[Completion], stream: bool) -> None:
    extra = {"top_k": 40, "ignore_eos": True}
    made: Any = served.openai.completions.create(
        model="tiny", prompt=TEXTS[0], n=3, seed=7, temperature=0.9, top_p=0.95, max_tokens=12, stream=stream,
        extra_body=extra,
    )  # fmt: skip
    texts = ["", "", ""]
    for chunk in made if stream else [made]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [each.text for each in sampled] and len(set(texts)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(served: Served, expected: dict[str, Completion], stream: bool) -> None:
    text = expected[TEXTS[1]].text
    stop = text[10:14]
    made: Any = served.openai.completions.create(
        prompt=TEXTS[1], max_tokens=12, stop=[stop, "never there"], stream=stream, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in (made if stream else [made])]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_through_the_template(served: Served, answered: Completion, stream: bool) -> None:
    made: Any = served.openai.chat.completions.create(messages=CHAT, max_completion_tokens=12, stream=stream, **GREEDY)
    chunks = list(made) if stream else [made]
    said = [chunk.choices[0].delta if stream else chunk.choices[0].message for chunk in chunks]
    assert "".join(each.content or "" for each in said) == answered.text
    assert said[0].role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert chunks[0].id.startswith("chatcmpl-")


@pytest.mark.slow
def test_a_chat_goes_on_to_the_end_of_the_context_unless_told(served: Served, answered: Completion) -> None:
    extra = {"ignore_eos": True}
    made = served.openai.chat.completions.create(model="tiny", messages=CHAT, temperature=0, extra_body=extra)
    assert made.usage is not None and made.usage.total_tokens == 160
    parts: Any = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
    same = served.openai.chat.completions.create(messages=parts, max_tokens=12, **GREEDY)
    assert same.choices[0].message.content == answered.text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(served: Served, expected: dict[str, Completion], stream: bool) -> None:
    made: Any = served.openai.completions.create(prompt=TEXTS[:2], max_tokens=12, echo=True, stream=stream, **GREEDY)
    texts = ["", ""]
    for chunk in made if stream else [made]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [text + expected[text].text for text in TEXTS[:2]]


def test_penalties_and_biases_reach_the_engine(served: Served, shaped: Completion) -> None:
    made = served.openai.completions.create(
        model="tiny", prompt=TEXTS[3], max_tokens=12, temperature=0, presence_penalty=0.5, frequency_penalty=0.4,
        logit_bias={"300": 1.5}, extra_body={"ignore_eos": True, "repetition_penalty": 1.2, "min_tokens": 3},
    )  # fmt: skip
    assert made.choices[0].text == shaped.text


def test_a_priority_goes_with_the_request_and_changes_no_token(served: Served, shaped: Completion) -> None:
    assert CompletionRequest(prompt="a", priority=-3).sampling(4).priority == -3
    made = served.openai.completions.create(
        model="tiny", prompt=TEXTS[3], max_tokens=12, temperature=0, presence_penalty=0.5, frequency_penalty=0.4,
        logit_bias={"300": 1.5},
        extra_body={"ignore_eos": True, "repetition_penalty": 1.2, "min_tokens": 3, "priority": 4},
    )  # fmt: skip
    assert made.choices[0].text == shaped.text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_with_completions_and_chats(
    served: Served, expected: dict[str, Completion], stream: bool
) -> None:
    made: Any = served.openai.completions.create(prompt=TEXTS[0], max_tokens=12, logprobs=2, stream=stream, **GREEDY)
    parts = [chunk.choices[0].logprobs for chunk in (made if stream else [made]) if chunk.choices[0].logprobs]
    tokens = [token for part in parts for token in part.tokens]
    assert "".join(tokens) == expected[TEXTS[0]].text and len(tokens) == 12
    assert [offset for part in parts for offset in part.text_offset] == [len("".join(tokens[:i])) for i in range(12)]
    for token, logprob, top in [
        each for part in parts for each in zip(part.tokens, part.token_logprobs, part.top_logprobs, strict=True)
    ]:
        assert top[token] == logprob == max(top.values()) < 0 and len(top) == 2
    asked: Any = {"messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    chat: Any = served.openai.chat.completions.create(stream=stream, **asked, **GREEDY)
    pieces = [chunk.choices[0].logprobs for chunk in (chat if stream else [chat]) if chunk.choices[0].logprobs]
    entries = [entry for piece in pieces for entry in piece.content]
    assert len(entries) == 4
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_have_to_match_a_schema_or_an_expression(served: Served, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "switch", "strict": True, "schema": schema}}
    wanted["json_schema"]["schema"] |= {"additionalProperties": False}
    asked: Any = {"model": "tiny", "messages": CHAT, "temperature": 0.8, "seed": 5, "stream": stream}
    made: Any = served.openai.chat.completions.create(response_format=wanted, **asked)
    said = [
        c.choices[0].delta.content if stream else c.choices[0].message.content for c in (made if stream else [made])
    ]
    assert json.loads("".join(each or "" for each in said)).keys() == {"on"}
    regex = served.openai.completions.create(model="tiny", prompt=TEXTS[0], extra_body={"guided_regex": "[xyz]{4}"})
    assert re.fullmatch("[xyz]{4}", regex.choices[0].text) and regex.choices[0].finish_reason == "stop"


def test_models_are_listed_and_found(served: Served) -> None:
    (model,) = served.openai.models.list().data
    assert model.id == "tiny" and model == served.openai.models.retrieve("tiny")


def test_tokens_and_texts_are_turned_into_each_other(served: Served, expected: dict[str, Completion]) -> None:
    tokens = served.post("/tokenize", prompt=TEXTS[0]).json()
    assert tokens["tokens"] == list(expected[TEXTS[0]].prompt_token_ids) and tokens["count"] == len(tokens["tokens"])
    assert TEXTS[0] in served.post("/detokenize", tokens=tokens["tokens"]).json()["prompt"]
    chat = served.post("/tokenize", messages=CHAT).json()["tokens"]
    assert "user: What is a list?\nassistant:" in served.post("/detokenize", tokens=chat).json()["prompt"]


def test_what_asks_for_nothing_may_be_sent(served: Served, expected: dict[str, Completion]) -> None:
    body = {"prompt": TEXTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "user": "someone"}
    neutral = {"suffix": None, "best_of": 1, "store": False, "seed": None}
    answer = served.post("/v1/completions", **body, **neutral)
    assert answer.json()["choices"][0]["text"] == expected[TEXTS[0]].text
    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("given", "kept"),
    [(["Job-7.a_B"], "Job-7.a_B"), (["first", "second"], "first"), (["a b"], ""), (["x" * 65], ""), ([""], "")],
    ids=["one", "two", "another character", "too long", "empty"],
)
def test_a_request_keeps_its_id(given: list[str], kept: str, served: Served) -> None:
    headers = [("X-Request-Id", each) for each in given]
    body = {"prompt": TEXTS[0], "max_tokens": 1}
    answer = served.http.post("/v1/completions", json=body, headers=headers)
    (told,) = answer.headers.get_list("x-request-id")
    assert answer.json()["id"] == f"cmpl-{told}"
    assert told == kept if kept else (len(told) == 32 and told not in given)


@pytest.mark.slow
def test_metrics_count_what_was_done(served: Served) -> None:
    names = ("core_generated_tokens_total", 'core_sequences_total{outcome="length"}', "core_prompt_tokens_total")
    counts = ("core_time_to_first_token_seconds_count", "core_time_between_tokens_seconds_count")
    before = {name: served.metric(name) for name in (*names, *counts)}
    answer = served.post("/v1/completions", prompt=[TEXTS[0]] * 2, max_tokens=5, ignore_eos=True, stream=True)
    assert events(answer)[-1] == "[DONE]"
    grown = [served.metric(name) - before[name] for name in (*names, *counts)]
    assert grown == [10, 2, 2 * served.post("/tokenize", prompt=TEXTS[0]).json()["count"], 2, 8]
    assert served.metric("core_sequences_running") == served.metric("core_cache_blocks_used") == 0
    assert served.metric("core_cache_blocks") == 40 and served.metric("core_engine_up") == 1
