"""vLLM as a peer: room for its cache, and its engine asked step by step; a stand-in for vLLM takes the steps here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.peers import PeerWork
from core_cuda.peers import PEERS, vllm
from core_cuda.peers.room import bytes_per_token, cache_bytes, fitting, longest

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
GIB = 1 << 30


class Engine:
    """Takes steps as vLLM's does: one is queued ahead, and a prompt is computed a few at a time."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.waiting: list[tuple[str, int]] = []
        self.steps = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SimpleNamespace) -> None:
        assert params.max_tokens == params.min_tokens and params.ignore_eos and params.temperature == 0
        self.waiting.append((name, params.max_tokens))

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        if self.steps == 1:
            return []  # the queue is filled first
        if self.waiting:
            name, most = self.waiting.pop(0)
            self.requests[name] = most
        found = []
        for name in list(self.requests):
            found.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[self.steps])]))
            self.requests[name] -= 1
            if not self.requests[name]:
                del self.requests[name]
        return found

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)


class LLM:
    made: ClassVar[list[LLM]] = []

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.llm_engine = Engine()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        LLM.made.append(self)

    def apply_model(self, function: Any) -> None:
        function(self.model)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.LLM, package.SamplingParams = LLM, lambda **fields: SimpleNamespace(**fields)  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setattr(vllm, "free_bytes", lambda: 8 * GIB)
    for name in vllm._ENVIRONMENT:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setattr(vllm, "_held", {})
    yield


def work(folder: Path, batch: int, phase: str = "decode", sizes: Sequence[tuple[int, int]] = ()) -> PeerWork:
    from transformers import LlamaConfig

    LlamaConfig(**CONFIG, intermediate_size=64, vocab_size=64).save_pretrained(folder)
    prompts = [[1, 2, 3]] * batch
    fields: dict[str, Any] = {"folder": folder, "dtype": "bfloat16", "threads": 1, "phase": phase, "limit": 40}
    return PeerWork(**fields, prompts=prompts, sizes=sizes or [(batch, 40)])


def test_one_engine_serves_the_cells_and_counts_steps_by_their_tokens(fake: None, tmp_path: Path) -> None:
    sizes = [(1, 40), (3, 40)]
    first = vllm.engine(work(tmp_path, 3, sizes=sizes))
    assert [len(row) for row in first.tokens] == [2, 2, 2]
    assert [len(row) for row in first.run(5)] == [5, 5, 5]
    assert first.elapsed is not None and 0 < first.elapsed() < 1
    first.end()
    second = vllm.engine(work(tmp_path, 1, sizes=sizes))
    assert len(second.tokens) == 1 and [len(row) for row in second.run(2)] == [2]
    (llm,) = LLM.made
    assert llm.options["max_num_seqs"] == 3 and llm.options["load_format"] == "dummy"
    assert llm.options["enable_prefix_caching"] and not llm.llm_engine.requests
    assert llm.options["compilation_config"] == {"cudagraph_capture_sizes": [1, 3]}
    assert llm.options["max_model_len"] >= 40 and llm.options["kv_cache_memory_bytes"] == cache_bytes(256, 3, 40)


def test_a_prompt_ends_with_its_first_token(fake: None, tmp_path: Path) -> None:
    runner = vllm.engine(work(tmp_path, 1, "prefill"))
    assert [len(row) for row in runner.tokens] == [1] and [len(row) for row in runner.run(4)] == [4]
    assert "compilation_config" not in LLM.made[0].options and not LLM.made[0].options["enable_prefix_caching"]


def test_weights_that_are_there_are_read(fake: None, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12")
    vllm.engine(work(tmp_path, 1))
    assert LLM.made[0].options["load_format"] == "auto"


def test_an_engine_without_room_says_that_memory_is_out(
    fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.engine(work(tmp_path, 1))
    with pytest.raises(RuntimeError, match="out of memory: the running engine"):
        vllm.engine(work(tmp_path, 2))
    vllm._held.clear()
    monkeypatch.setattr(vllm, "free_bytes", lambda: 1 * GIB)
    with pytest.raises(RuntimeError, match=r"out of memory: .* GiB are free"):
        vllm.engine(work(tmp_path, 1))


def test_room_is_an_upper_bound_by_the_configuration() -> None:
    assert bytes_per_token(CONFIG, 2) == 2 * 2 * 2 * 16 * 2
    assert bytes_per_token({**CONFIG, "head_dim": 128}, 2) == 2 * 2 * 2 * 128 * 2
    assert bytes_per_token({"text_config": {**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}}, 2) == 2 * 576 * 2
    assert longest(256, 1100) >= 1100 + 256 * 1100 // 8192
    per_token, weights = 131_072, 16 * GIB
    assert cache_bytes(per_token, 64, 1100) >= 64 * 1100 * per_token
    sizes = [(64, 1100), (1, 1100), (256, 1100)]
    assert fitting(sizes, per_token, weights, 79 * GIB) == sorted(sizes)
    assert fitting(sizes, per_token, weights, 40 * GIB) == [(1, 1100), (64, 1100)]
    assert fitting(sizes, per_token, weights, 16 * GIB) == []


def test_drawn_weights_are_those_of_the_bench() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256))
    vllm.draw(model, 256**-0.5)
    linear, norm = model.requires_grad_(False)
    assert abs(float(linear.weight.std()) * 16 - 1) < 0.05 and float(linear.bias.abs().max()) <= 0.25
    assert 0.75 <= float(norm.weight.min()) < float(norm.weight.max()) <= 1.25


def test_the_runner_that_the_peer_names_is_there() -> None:
    (peer,) = PEERS
    assert peer.runner == "core_cuda.peers.vllm:engine" and peer.lasting and peer.draws_weights
    assert json.dumps(peer.requires)
