"""docs/serving.md: the curl line streams, every metric is there, and the fields named are those that are served."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.engine.serve.engine import Engine
from tests.engine.http.serving import events, httpx, offline, serving

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
CURL = next(line for line in PAGE.splitlines() if line.startswith("curl "))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The engine of `make serve-demo`."""
    from tests.engine.http.serving import load

    with load(template=None) as engine:
        yield engine


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_line_streams_what_the_model_says(engine: Engine) -> None:
    wanted = offline(engine, "The Python interpreter is", 32)
    with serving(engine, model_name="tiny_llama") as served:
        command = shlex.split(CURL.replace("http://127.0.0.1:8000", served.url))
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = events(httpx.Response(200, text=printed))
    assert found.pop() == "[DONE]"
    assert "".join(each["choices"][0]["text"] for each in found) == wanted.text != ""


def test_every_metric_that_is_named_is_there_and_the_other_way_round(engine: Engine) -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `core_")]
    named = {re.sub(r"(_total)?({.*})?$", "", name) for row in rows for name in re.findall(r"`(core_[^`…]+)`", row)}
    with serving(engine) as served:
        typed = re.findall(
            r"^# TYPE (core_\w+) (?!gauge)|^# TYPE (core_\w+) gauge", served.http.get("/metrics").text, re.M
        )
    there = {re.sub(r"_total$", "", first or second) for first, second in typed}
    there = {name for name in there if not name.endswith("_created")}
    assert named == {name for name in there if not name.startswith("core_engine_") or name == "core_engine_up"}


def test_the_fields_that_are_named_are_those_that_are_served() -> None:
    from core.engine.http.protocol import ChatRequest, CompletionRequest

    text = PAGE[PAGE.index("Both generating endpoints take") : PAGE.index("A field that is not in this list")]
    named = set(re.findall(r"`(\w+)(?:\.\w+)?`", text)) - {"token_ids", "prompt_token_ids"}
    served = {*CompletionRequest.model_fields, *ChatRequest.model_fields} - {"prompt", "messages"}
    assert named == served
