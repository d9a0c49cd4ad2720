"""What the server refuses: with the status and the error object of OpenAI's API, naming the field."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from core.engine.serve import grammar
from core.engine.serve.engine import Engine
from tests.engine.http.serving import TEMPLATE, TEXTS, Brake, Served, openai, serving, wait_for

BODY = {"prompt": "This", "max_tokens": 4}


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    (name,) = response.json()
    found: dict[str, Any] = response.json()[name]
    assert name == "error" and found.keys() == {"message", "type", "param", "code"} and found["message"]
    return found


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tools", [{"type": "function"}], "unsupported_parameter"),
        ("suffix", "end", "unsupported_parameter"),
        ("best_of", 3, "unsupported_parameter"),
        ("logit_bais", {}, "unsupported_parameter"),
        ("temperature", -1, "invalid_value"),
        ("temperature", "hot", "invalid_value"),
        ("top_p", 0, "invalid_value"),
        ("top_k", -2, "invalid_value"),
        ("top_k", True, "invalid_value"),
        ("top_k", 10**400, "invalid_value"),
        ("min_tokens", 10**400, "invalid_value"),
        ("stop_token_ids", [10**400], "invalid_value"),
        ("seed", 2**70, "invalid_value"),
        ("max_tokens", 0, "invalid_value"),
        ("max_tokens", 1.5, "invalid_value"),
        ("max_tokens", 1000, "context_length_exceeded"),
        ("n", 0, "invalid_value"),
        ("min_p", 2, "invalid_value"),
        ("priority", 1.5, "invalid_value"),
        ("priority", 2**40, "invalid_value"),
        ("presence_penalty", 3, "invalid_value"),
        ("logit_bias", {"word": 1}, "invalid_value"),
        ("logit_bias", {"99999": 1}, "invalid_value"),
        ("logprobs", 30, "invalid_value"),
        ("logprobs", True, "invalid_value"),
        ("stop", [""], "invalid_value"),
        ("stop", ["a"] * 17, "invalid_value"),
        ("stream_options", {"include_usage": True}, "invalid_value"),
        ("guided_regex", "(", "invalid_grammar"),
        ("response_format", {"type": "json_schema"}, "invalid_value"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}, "invalid_grammar"),
        ("prompt", "", "invalid_prompt"),
        ("prompt", "word " * 500, "invalid_prompt"),
        ("prompt", [5, 2048], "invalid_prompt"),
        ("prompt", {"text": "This"}, "invalid_value"),
        ("prompt", None, "missing_required_parameter"),
    ],
)
def test_a_field_is_named(served: Served, field: str, value: Any, code: str) -> None:
    found = error(served.post("/v1/completions", **{**BODY, field: value}), 400)
    assert (found["param"], found["code"], found["type"]) == (field, code, "invalid_request_error")
    assert field in found["message"] or code in ("invalid_prompt", "invalid_grammar")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "invalid_value"),
        ({"role": "user"}, "missing_required_parameter"),
        ({"role": "assistant", "content": "", "tool_calls": []}, "unsupported_parameter"),
    ],
)
def test_a_message_of_another_shape_is_refused(served: Served, message: Any, code: str) -> None:
    found = error(served.post("/v1/chat/completions", messages=[message]), 400)
    assert "[" not in found["message"] and "str" not in found["message"].split()[0]
    assert found["param"] == "messages" and found["code"] in (code, "invalid_value", "unsupported_parameter")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("template", "phrase"),
    [(None, "has no chat template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")],
)
def test_a_chat_that_the_tokenizer_can_not_write_is_refused(engine: Engine, template: str, phrase: str) -> None:
    tokenizer = engine.loaded.require_tokenizer()
    tokenizer.chat_template = template
    try:
        with serving(engine) as served:
            found = error(served.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}]), 400)
    finally:
        tokenizer.chat_template = TEMPLATE
    assert found["param"] == "messages" and phrase in found["message"]


def test_what_is_no_request_is_refused(served: Served) -> None:
    headers = {"Content-Type": "application/json"}
    assert error(served.http.post("/v1/completions", content="{", headers=headers), 400)["code"] == "invalid_json"
    assert error(served.http.post("/v1/completions", content="[1]", headers=headers), 400)["param"] is None
    nothing = error(served.http.get("/v1/nothing"), 404)["message"]
    assert nothing.startswith("Not Found: GET /v1/nothing; there is ") and "/v1/chat/completions" in nothing
    assert len(error(served.http.get(f"/v1/{'n' * 5000}"), 404)["message"]) < 1000
    assert "GET /v1/completions" in error(served.http.get("/v1/completions"), 405)["message"]
    assert error(served.post("/v1/completions", **BODY, model="gpt"), 404)["code"] == "model_not_found"
    error(served.post("/tokenize", model="tiny"), 400)
    assert error(served.post("/detokenize", tokens=[99999]), 400)["param"] == "tokens"


@pytest.mark.slow
def test_bodies_that_no_client_sends_are_answered_all_the_same(served: Served) -> None:
    half = "\\ud800"  # of a surrogate pair, as JSON may write it
    deep = "[" * 100_000 + "]" * 100_000
    bodies = [
        *(
            f'{{"prompt": {prompt}, "max_tokens": 2}}'
            for prompt in (f'"{half}"', f'["a", "{half}"]', deep, "[[]]", "1e999")
        ),
        *(f'{{"prompt": "a", "{field}": "{half}"}}' for field in ("stop", "user", "model", "suffix", "guided_regex")),
        *(f'{{"prompt": "a", "temperature": {value}}}' for value in ("NaN", "1e999", "-0.0001")),
        *(f'{{"prompt": "a", "{field}": {10**30}}}' for field in ("max_tokens", "n", "seed")),
        *("", "null", '"a"', deep[:1000], f'{{"{half}": 1}}'),
    ]
    headers = {"Content-Type": "application/json"}
    for body in bodies:
        answer = served.http.post("/v1/completions", content=body.encode(), headers=headers)
        assert answer.status_code in (400, 404), (body[:80], answer.text)
        assert answer.json()["error"]["message"]
    assert error(served.http.post("/v1/completions", content=b"\xff\xfe", headers=headers), 400)
    untyped = served.http.post("/v1/completions", content=b'{"prompt": "a"}')
    assert "Content-Type: application/json" in error(untyped, 400)["message"]
    for path, body in (("/tokenize", f'{{"prompt": "{half}"}}'), ("/detokenize", f'{{"tokens": [{10**30}]}}')):
        error(served.http.post(path, content=body.encode(), headers=headers), 400)


@pytest.mark.slow
def test_a_grammar_that_grows_too_large_is_said(served: Served) -> None:
    body = {"prompt": "This", "max_tokens": 9, "guided_regex": "(a{1000}){1000}"}
    assert error(served.post("/v1/completions", **body), 400)["code"] == "invalid_grammar"
    assert served.post("/v1/completions", **BODY).status_code == 200


def test_what_the_server_lacks_is_not_the_grammars_fault(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    monkeypatch.setattr(grammar, "_OF_MODELS", WeakKeyDictionary())
    found = error(served.post("/v1/completions", **BODY, guided_regex="[0-9]+"), 400)
    assert (found["param"], found["code"]) == ("guided_regex", "unsupported_parameter")
    assert "pip" not in found["message"] and sys.prefix not in found["message"]


def test_a_number_of_more_digits_than_python_reads_is_refused_as_a_value(served: Served) -> None:
    body = f'{{"prompt": "This", "seed": {"9" * 5000}}}'
    answer = served.http.post("/v1/completions", content=body.encode(), headers={"Content-Type": "application/json"})
    assert "digits" in error(answer, 400)["message"]


@pytest.mark.slow
def test_without_the_key_nothing_is_told_but_health(engine: Engine) -> None:
    with serving(engine, api_key="kept-secret") as served:
        assert served.openai.completions.create(model="tiny", **BODY).choices  # type: ignore[call-overload]
        for wrong in ({}, {"Authorization": "Bearer kept-secre"}, {"Authorization": "Basic kept-secret"}):
            del served.http.headers["Authorization"]
            served.http.headers.update(wrong)
            for path in ("/v1/models", "/metrics", "/docs"):
                answer = served.http.get(path)
                assert error(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert served.http.get("/health").status_code == served.http.get("/ready").status_code == 200
            served.http.headers["Authorization"] = ""
        with pytest.raises(openai.AuthenticationError):
            served.openai.with_options(api_key="other").models.list()


@pytest.mark.slow
def test_a_body_is_bounded_in_size_and_time(engine: Engine) -> None:
    with serving(engine, max_body_bytes=1000, client_timeout_s=0.3) as served:
        assert served.post("/v1/completions", prompt="x" * 700, max_tokens=1).status_code != 413
        for size in (1000, 5000, 10**7):  # some read to their end, the last one not
            assert error(served.post("/v1/completions", prompt="x" * size), 413)["code"] == "body_too_large"
        chunks = (b"x" * 600 for _ in range(3))  # no length is stated
        assert error(served.http.post("/v1/completions", content=chunks), 413)
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert b" 408 " in connection.recv(4096)


@pytest.mark.slow
def test_a_full_queue_is_said_and_when_to_come_again(engine: Engine, brake: Brake) -> None:
    with serving(engine, max_queue=2) as served, ThreadPoolExecutor(6) as pool:
        brake.hold()
        waiting = [pool.submit(served.post, "/v1/completions", prompt=text, max_tokens=3) for text in TEXTS]
        wait_for(lambda: served.server.service.admission.active == 4)
        refused = served.post("/v1/completions", prompt="This", n=3, max_tokens=3)
        found = error(refused, 429)
        assert (found["code"], found["type"], refused.headers["retry-after"]) == ("queue_full", "rate_limit_error", "1")
        last = pool.submit(served.post, "/v1/completions", prompt="This", n=2, max_tokens=3)
        wait_for(lambda: served.server.service.admission.active == 6)
        error(served.post("/v1/completions", **BODY), 429)
        assert error(served.post("/v1/completions", **BODY, n=7), 400)["code"] == "too_many_sequences"
        brake.release()
        assert [each.result().status_code for each in (*waiting, last)] == [200] * 5
        assert served.post("/v1/completions", **BODY).status_code == 200
        assert served.metric('core_http_answers_total{path="/v1/completions",status="429"}') == 2


def test_lines_of_the_log_are_json_and_tell_nothing_private(served: Served, caplog: Any) -> None:
    from core.engine.http.logs import JsonFormatter

    with caplog.at_level("INFO", logger="core.serve"):
        answer = served.post("/v1/completions", prompt="a private text", max_tokens=2, user="me", ignore_eos=True)
        error(served.post("/v1/completions", prompt="a private text", max_tokens=-5), 400)
        wait_for(lambda: len([r for r in caplog.records if r.message == "http"]) == 2)
    text = [JsonFormatter().format(record) for record in caplog.records]
    lines = [json.loads(line) for line in text]
    generation, http, refused = lines
    assert generation["request_id"] == http["request_id"] == answer.headers["x-request-id"] != refused["request_id"]
    assert (generation["completion_tokens"], generation["outcomes"], generation["user"]) == (2, ["length"], "me")
    assert (http["path"], http["status"], refused["status"]) == ("/v1/completions", 200, 400)
    assert generation["first_token_ms"] <= generation["duration_ms"] <= http["duration_ms"] + 1
    assert not any("private" in line for line in text)


@pytest.mark.slow
def test_what_libraries_warn_of_is_a_line_of_the_log_too() -> None:
    script = "import warnings, core.engine.http.logs as logs; logs.log_as_json(); warnings.warn('old\\nways')\n"
    script += "from transformers.utils import logging; logging.get_logger('transformers.x').warning('falls back')"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    first, second = map(json.loads, told.splitlines())
    assert first["logger"] == "py.warnings" and "old\nways" in first["event"]
    assert (second["logger"], second["event"], second["level"]) == ("transformers.x", "falls back", "warning")
