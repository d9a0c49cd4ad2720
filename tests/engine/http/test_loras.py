"""Adapters by the name that clients give as `model`, as vLLM has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("openai", reason="needs the extra 'dev'")

import openai

from core.engine.config import SamplingParams
from core.engine.serve.engine import Engine
from tests.engine.http.serving import CONFIG, TEXTS, Served, load, serving
from tests.engine.lora.folders import ATTENTION, make_layers, save_adapter


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("adapters")
    with load(replace(CONFIG, max_loras=2, max_lora_rank=4)) as engine:
        for seed, name in enumerate(("one", "two")):
            layers = make_layers(engine.loaded.model, ATTENTION, rank=4, seed=seed)
            engine.load_lora(name, save_adapter(folder / name, layers, rank=4, alpha=16))
        yield engine


@pytest.fixture(scope="module")
def answers(adapted: Engine) -> dict[str, str]:
    """What each gives without a server."""
    params = SamplingParams(max_new_tokens=12)
    found = {name: adapted.generate(TEXTS[0], params, lora=name)[0].text for name in ("one", "two")}
    return {"tiny": adapted.generate(TEXTS[0], params)[0].text, **found}


@pytest.fixture(scope="module")
def served(adapted: Engine, answers: dict[str, str]) -> Iterator[Served]:
    with serving(adapted) as served:
        yield served


@pytest.mark.slow
def test_the_field_model_selects_an_adapter(served: Served, answers: dict[str, str]) -> None:
    assert len(set(answers.values())) == 3
    for name, text in answers.items():
        answer = served.openai.completions.create(model=name, prompt=TEXTS[0], max_tokens=12, temperature=0)
        assert (answer.model, answer.choices[0].text) == (name, text)
    chunks = list(
        served.openai.completions.create(model="two", prompt=TEXTS[0], max_tokens=12, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == answers["two"]
    assert {chunk.model for chunk in chunks} == {"two"}
    messages = [{"role": "user", "content": "Hello"}]
    chats = [
        served.openai.chat.completions.create(model=name, messages=messages, max_tokens=8, temperature=0)  # type: ignore[call-overload]
        for name in answers
    ]
    assert len({chat.choices[0].message.content for chat in chats}) == 3


def test_adapters_are_listed_with_their_parent(served: Served) -> None:
    listed = served.http.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [("tiny", None), ("one", "tiny"), ("two", "tiny")]
    assert served.http.get("/v1/models/two").json()["parent"] == "tiny"
    assert served.post("/tokenize", model="one", prompt="This").status_code == 200


def test_another_name_is_refused_with_those_that_there_are(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'three' is not served here; there is 'tiny', 'one', 'two'"):
        served.openai.completions.create(model="three", prompt=TEXTS[0])


def test_adapters_come_and_go_while_it_serves(served: Served, adapted: Engine) -> None:
    folder = adapted.loras["one"].path
    loop = served.server._loop
    assert loop is not None
    engine = served.server.service.engine
    asyncio.run_coroutine_threadsafe(engine.unload_lora("one"), loop).result(30)
    assert served.http.get("/v1/models/one").status_code == 404
    asyncio.run_coroutine_threadsafe(engine.load_lora("one", folder), loop).result(30)
    assert served.http.get("/v1/models/one").status_code == 200
