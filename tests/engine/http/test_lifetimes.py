"""Clients that leave, engines that fail, servers that are told to stop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from core.engine.serve.engine import Engine
from tests.engine.http.serving import TEXTS, Brake, Served, events, httpx, offline, openai, serving, wait_for
from tests.engine.http.test_refusals import error

LONG = {"prompt": TEXTS[0], "max_tokens": 150, "ignore_eos": True, "temperature": 0}


def idle(served: Served) -> bool:
    return served.metric("core_sequences_running") + served.metric("core_cache_blocks_used") == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_its_sequences(served: Served, n: int) -> None:
    aborted, tokens = 'core_sequences_total{outcome="abort"}', "core_generated_tokens_total"
    before = served.metric(aborted), served.metric(tokens)
    with served.http.stream("POST", "/v1/completions", json={**LONG, "n": n, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is dropped closes the stream
        assert next(lines).startswith("data: ")
        assert served.metric("core_sequences_running") == n
    wait_for(lambda: idle(served))
    assert served.metric(aborted) == before[0] + n
    assert 0 < served.metric(tokens) - before[1] < 150 * n
    assert served.server.service.admission.active == 0


def test_a_client_that_leaves_before_its_answer_does_too(served: Served, brake: Brake) -> None:
    aborted = served.metric('core_sequences_total{outcome="abort"}')
    brake.hold()
    with pytest.raises(httpx.ReadTimeout):
        served.http.post("/v1/completions", json=LONG, timeout=0.3)
    brake.release()
    wait_for(lambda: served.metric('core_sequences_total{outcome="abort"}') == aborted + 1)
    assert idle(served) and served.server.service.admission.active == 0


@pytest.mark.slow
def test_a_reader_that_pauses_gets_everything_and_holds_nobody_up(engine: Engine) -> None:
    wanted = offline(engine, TEXTS[0], 150, ignore_eos=True)
    with serving(engine) as served:
        with served.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as slow:
            quick = served.post("/v1/completions", prompt="This", max_tokens=5, ignore_eos=True)
            assert quick.json()["usage"]["completion_tokens"] == 5
            wait_for(lambda: idle(served))  # the engine has done with it before anything is read
            slow.read()
        assert "".join(each["choices"][0]["text"] for each in events(slow)[:-1]) == wanted.text


@pytest.mark.slow
def test_a_step_that_fails_once_is_taken_again(engine: Engine, brake: Brake) -> None:
    wanted = offline(engine, TEXTS[0], 20, ignore_eos=True)
    failing = iter([False, False, True])

    def fail() -> None:
        if next(failing, False):
            raise RuntimeError("a passing fault")

    brake.before = fail
    with serving(engine) as served:
        answer = served.post("/v1/completions", **{**LONG, "max_tokens": 20})
    assert answer.json()["choices"][0]["text"] == wanted.text


@pytest.mark.cases(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_twice_ends_its_requests_and_not_the_server(
    engine: Engine, brake: Brake, stream: bool
) -> None:
    def fail() -> None:
        if len(engine._requests) == 2:  # the two together are what the model can't do
            raise RuntimeError("out of something")

    brake.before = fail
    with serving(engine) as served:
        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(served.post, "/v1/completions", **LONG, stream=stream) for _ in range(2)]:
                answer = each.result()
                found = events(answer)[-1]["error"] if stream else error(answer, 500)
                assert found["code"] == "step_failed" and "out of something" in found["message"]
        assert served.http.get("/health").status_code == 200
        assert served.post("/v1/completions", prompt="This", max_tokens=2).status_code == 200
        assert served.metric('core_sequences_total{outcome="error"}') == 2 and idle(served)


@pytest.mark.slow
def test_a_dead_engine_is_said_by_health(engine: Engine, brake: Brake) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    with serving(engine) as served:
        assert served.post("/v1/completions", prompt="This", max_tokens=2).status_code == 200
        brake.before = fail
        assert error(served.post("/v1/completions", **LONG), 500)["code"] == "step_failed"
        wait_for(lambda: served.server.service.engine.failure)
        for path in ("/health", "/ready"):
            assert "the device is lost" in error(served.http.get(path), 503)["message"]
        assert error(served.post("/v1/completions", **LONG), 503)["code"] == "engine_dead"
        assert served.metric("core_engine_up") == 0
        with pytest.raises(openai.InternalServerError):
            served.openai.completions.create(model="tiny", prompt="This")


@pytest.mark.slow
def test_draining_finishes_what_runs_and_refuses_the_rest(engine: Engine, brake: Brake) -> None:
    wanted = offline(engine, TEXTS[1], 30, ignore_eos=True)
    with serving(engine) as served, ThreadPoolExecutor(1) as pool:
        brake.hold()
        body: dict[str, Any] = {**LONG, "prompt": TEXTS[1], "max_tokens": 30, "stream": True}
        running = pool.submit(served.post, "/v1/completions", **body)
        wait_for(lambda: served.server.service.admission.active == 1)
        served.drain()
        wait_for(lambda: served.http.get("/ready").status_code == 503)
        assert served.http.get("/health").status_code == 200
        refused = served.post("/v1/completions", **LONG)
        assert error(refused, 503)["code"] == "stopping" and refused.headers["retry-after"] == "5"
        brake.release()
        assert "".join(each["choices"][0]["text"] for each in events(running.result())[:-1]) == wanted.text
        wait_for(lambda: served.server.should_exit)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")


def test_draining_is_bounded_and_says_what_it_cut(engine: Engine) -> None:
    with serving(engine, drain_timeout_s=0.2) as served, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(served.post, "/v1/completions", **LONG, stream=stream) for stream in (True, False)]
        wait_for(lambda: served.metric("core_generated_tokens_total") > 2)
        served.drain()
        stream, whole = (each.result() for each in running)
        assert events(stream)[-1]["error"]["code"] == error(whole, 503)["code"] == "stopping"
        wait_for(lambda: served.server.should_exit)
    assert not engine.has_unfinished


@pytest.mark.cases(1)
@pytest.mark.parametrize(("model_type", "route"), [("codegen", "static"), ("openai-gpt", "recompute")])
def test_models_without_a_paged_cache_are_served(model_type: str, route: str) -> None:
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.host.selection import select_device
    from tests.engine.http.serving import CONFIG

    device = select_device("cpu")
    loaded = build_model(tiny_config(model_type), torch_device=device.torch_device)
    with Engine(loaded, device, CONFIG) as engine:
        assert engine.route == route
        wanted = engine.generate([[5, 6, 7]])[0].token_ids
        with serving(engine) as served:
            body = {"prompt": [[5, 6, 7]] * 2, "max_tokens": 64, "temperature": 0, "return_token_ids": True}
            answer = served.post("/v1/completions", **body).json()
            assert [each["token_ids"] for each in answer["choices"]] == [list(wanted)] * 2
            assert served.metric("core_cache_blocks") == 0
            assert "no tokenizer" in error(served.post("/v1/completions", prompt="This"), 400)["message"]


@pytest.mark.slow
def test_without_a_cache_a_step_that_failed_once_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.host.selection import select_device
    from tests.engine.http.serving import CONFIG

    device = select_device("cpu")
    with Engine(build_model(tiny_config("openai-gpt"), torch_device=device.torch_device), device, CONFIG) as engine:
        wanted = engine.generate([[5, 6, 7]])[0].token_ids

        def fail_once(*_: Any) -> None:
            monkeypatch.undo()
            raise RuntimeError("lost")

        with serving(engine) as served:
            monkeypatch.setattr(engine._runner, "_compute", fail_once)
            body = {"prompt": [5, 6, 7], "max_tokens": 64, "temperature": 0, "return_token_ids": True}
            assert served.post("/v1/completions", **body).json()["choices"][0]["token_ids"] == list(wanted)
