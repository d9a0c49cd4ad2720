"""Answers that match a JSON schema or a regular expression, alone and beside others, drafted and not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'structured'")
pytest.importorskip("jsonschema", reason="needs the extra 'conformance'")

import jsonschema

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError, UsageError
from core.host.selection import select_device

CONFIG = EngineConfig(max_num_seqs=3, max_model_len=160, options=CompileOptions(mode="off"))
REGEX = r"(yes|no|perhaps), [0-9]{3}\.[a-f]{1,4}"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "kind": {"enum": ["list", "dict"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
TEXT = "Return a list of the names"
FREE = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "speculative"])
def engine(request: Any) -> Iterator[Engine]:
    """The embedded model, with and without drafts."""
    with Engine.load(embedded_model(), "cpu", replace(CONFIG, speculative=request.param)) as engine:
        yield engine


@pytest.mark.cases(1)
@pytest.mark.parametrize("heat", [{}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.0, "seed": 8, "min_p": 0.2}])
def test_an_answer_matches_and_its_mates_are_left_alone(engine: Engine, heat: dict[str, Any]) -> None:
    (alone,) = engine.generate(["This"], FREE)
    regex = SamplingParams(max_new_tokens=60, regex=REGEX, **heat)
    schema = SamplingParams(max_new_tokens=120, json_schema=json.dumps(SCHEMA), logprobs=1, **heat)
    first, second, third = engine.generate([TEXT, TEXT, "This"], [regex, schema, FREE])
    assert re.fullmatch(REGEX, first.text), first.text
    assert second.finish_reason == "stop"
    jsonschema.validate(json.loads(second.text), SCHEMA)
    assert first.finish_reason == "stop" and third.token_ids == alone.token_ids


@pytest.mark.cases(1)
def test_without_the_schema_the_model_says_something_else(engine: Engine) -> None:
    (free,) = engine.generate([TEXT], replace(FREE, max_new_tokens=60))
    with pytest.raises(ValueError):
        json.loads(free.text)


def test_a_schema_is_filled_to_its_end(engine: Engine) -> None:
    small = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    exact = json.dumps({**small, "additionalProperties": False})
    (found,) = engine.generate([TEXT], SamplingParams(max_new_tokens=120, json_schema=exact))
    assert found.finish_reason == "stop" and json.loads(found.text).keys() == {"on"}


@pytest.mark.parametrize(
    ("params", "phrase"),
    [
        ({"regex": "("}, "regex='('"),
        ({"json_schema": "{"}, "json_schema="),
        ({"json_schema": '{"type": 5}'}, "json_schema="),
    ],
)
def test_what_is_no_grammar_is_refused(engine: Engine, params: dict[str, Any], phrase: str) -> None:
    with pytest.raises(UsageError, match=re.escape(phrase)):
        engine.add_request(TEXT, SamplingParams(**params))
    assert not engine.has_unfinished


def test_a_model_without_a_tokenizer_can_not() -> None:
    device = select_device("cpu")
    loaded = build_model(tiny_config("llama"), torch_device=device.torch_device)
    with Engine(loaded, device, CONFIG) as engine, pytest.raises(ModelError, match="no tokenizer"):
        engine.add_request([5, 6], SamplingParams(regex="a"))


@pytest.mark.parametrize(
    "params", [{"regex": "a", "json_schema": "{}"}, {"regex": "a", "ignore_eos": True}, {"regex": 5}]
)
def test_contradictions_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**params)
