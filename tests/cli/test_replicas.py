"""`core serve --ray` before Ray comes into it: options, and what they leave for the replicas."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from core.cli.ranks import COMMAND_LINE
from core.cli.serving.replicas import check_ray, own_arguments, serve_by_replicas
from core.engine.http.config import ServerConfig
from core.errors import UsageError

CONFIG = ServerConfig(model_name="m")


def asked(**changes: Any) -> None:
    given: dict[str, Any] = {"replicas": "1", "address": None, "resources": [], "processes": 1, "sequences": 8}
    serve_by_replicas(CONFIG, **{**given, **changes})


def test_a_replica_gets_the_command_line_without_what_is_the_clusters() -> None:
    line = ["serve", "models/base", "--ray", "--replicas", "1:4", "--port=80", "--host", "0.0.0.0", "--tp", "2"]
    line += ["--replica-resource", "GPU=1", "--ray-address=h:1", "--lora", "a=b"]
    assert own_arguments(line) == ["serve", "models/base", "--tp", "2", "--lora", "a=b"]


@pytest.mark.parametrize("text", ["0", "2:1", "x", "1:", "-1", "1:2:3"])
def test_no_number_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no number or range"):
        asked(replicas=text)


def test_a_port_has_to_be_named() -> None:
    config = ServerConfig(model_name="m", port=0)
    with pytest.raises(UsageError, match="--port 0"):
        serve_by_replicas(config, replicas="1", address=None, resources=[], processes=1, sequences=8)


@pytest.mark.parametrize("text", ["GPU", "GPU=", "=1", "GPU=-1", "GPU=x"])
def test_what_is_no_resource_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not NAME=AMOUNT"):
        asked(resources=[text])


def test_a_resource_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="GPU=1 is given too"):
        asked(resources=["GPU=1", "CPU=2", "GPU=2"])


@pytest.mark.parametrize(
    "changes", [{"replicas": "2"}, {"address": "h:1"}, {"resources": ["GPU=1"]}], ids=["number", "address", "resource"]
)
def test_options_of_ray_want_ray(changes: dict[str, Any]) -> None:
    given = {"ray": False, "replicas": "1", "address": None, "resources": []}
    check_ray(**given)
    check_ray(**{**given, **changes, "ray": True})
    with pytest.raises(UsageError, match="--ray is not given"):
        check_ray(**{**given, **changes})


def test_a_rank_of_a_launcher_serves_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    given: dict[str, Any] = {"replicas": "1", "address": None, "resources": []}
    check_ray(ray=False, **given)
    with pytest.raises(UsageError, match="one of 4 ranks"):
        check_ray(ray=True, **given)


def test_a_key_on_the_command_line_is_refused() -> None:
    token = COMMAND_LINE.set(("serve", "--ray", "--api-key=secret"))
    try:
        with pytest.raises(UsageError, match="--api-key with --ray") as caught:
            asked()
    finally:
        COMMAND_LINE.reset(token)
    assert "secret" not in str(caught.value) and "CORE_API_KEY" in caught.value.remedy


def test_without_ray_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as caught:
        asked()
    assert "ray" in caught.value.found and "hf,serve,ray" in caught.value.remedy
