"""The processor's peers compute what transformers computes, and its rates of reading are rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers

from core.common.peers import PeerRunner, PeerWork
from core.errors import ModelError
from core_cpu import reading
from core_cpu.peers import PEERS, gguf_file, inductor, ipex_llm, llama_cpp, onnx_runtime
from core_cpu.peers.static import Step, eager_step, static_runner

STEPS = 5
PROMPT = 7


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, random weights, fp32; what it does not tie, GGUF has apart."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 64}
    name = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[request.param]
    config = getattr(transformers, name)(**sizes, tie_word_embeddings=request.param == "llama", initializer_range=0.3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() < 2:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)  # a norm that is left out shows
    place = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def work(folder: Path, phase: Any) -> PeerWork:
    count = 2 if phase == "decode" else 1
    prompts = [[(11 * row + 3 * at) % 160 for at in range(PROMPT)] for row in range(count)]
    limit = PROMPT + 2 + 2 * STEPS
    return PeerWork(folder=folder, dtype="float32", threads=1, phase=phase, prompts=prompts, limit=limit)


def expected(asked: PeerWork, count: int) -> list[list[int]]:
    """Return the greedy tokens of whole forwards, without any cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(asked.folder)
    ids: Tensor = torch.tensor(asked.prompts)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    found: list[list[int]] = ids[:, PROMPT:].tolist()
    return found


def check(make: Any, folder: Path) -> None:
    """Two rounds of decode, and prompts, against whole forwards."""
    asked = work(folder, "decode")
    runner: PeerRunner = make(asked)
    rows = [list(row) for row in runner.tokens]
    for _ in range(2):
        runner.ready()
        for row, new in zip(rows, runner.run(STEPS), strict=True):
            row += new
    assert rows == expected(asked, 2 + 2 * STEPS)
    asked = work(folder, "prefill")
    runner = make(asked)
    (first,) = expected(asked, 1)
    assert runner.tokens == [first] and runner.run(3) == [first * 3]


def eager(asked: PeerWork) -> PeerRunner:
    def make(model: Any, cache: Any, ids: Tensor) -> Step:
        return eager_step(model, cache)

    return static_runner(asked, make)


def test_the_static_cache_in_rounds_gives_the_tokens_of_whole_forwards(folder: Path) -> None:
    check(eager, folder)


@pytest.mark.slow
@pytest.mark.parametrize("make", [inductor.freezing, inductor.ahead_of_time])
def test_compiled_ways_give_the_tokens_of_whole_forwards(folder: Path, make: Any) -> None:
    import torch._inductor.config as config

    with config.patch(freezing=False):  # put back afterwards, as the end of a process would
        check(make, folder)


@pytest.mark.slow
def test_onnx_runtime_gives_the_tokens_of_whole_forwards(folder: Path) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"the peer onnxruntime takes {package}")
    check(onnx_runtime.session, folder)


def test_llama_cpp_gives_the_tokens_of_whole_forwards(folder: Path) -> None:
    for package in ("llama_cpp", "gguf"):
        pytest.importorskip(package, reason=f"the peer llama.cpp takes {package}")
    check(llama_cpp.context, folder)


@pytest.mark.parametrize(("weights", "compared"), [("q8_0", 4), ("q4_0", 1)])
def test_llama_cpp_quantises_the_layers_matrices(folder: Path, weights: str, compared: int) -> None:
    """Of random weights in 4 bits only the first tokens are mostly right: what follows is in another context."""
    for package in ("llama_cpp", "gguf"):
        pytest.importorskip(package, reason=f"the peer llama.cpp takes {package}")
    whole, coded = gguf_file.gguf_file(folder), gguf_file.gguf_file(folder, weights)
    assert coded.stat().st_size < whole.stat().st_size
    asked = replace(work(folder, "decode"), weights=weights)
    runner = llama_cpp.context(asked)
    rows = [[*first, *new][:compared] for first, new in zip(runner.tokens, runner.run(STEPS), strict=True)]
    assert any(ours == right[:compared] for ours, right in zip(rows, expected(asked, compared), strict=True))


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    pytest.importorskip("gguf", reason="the peer llama.cpp takes gguf")
    data, kind = gguf_file._data("blk.0.ffn_up.weight", torch.ones(3, 64), "q8_0")
    assert kind.name == "Q8_0" and data.shape[0] == 3
    with pytest.raises(ModelError, match="its rows have 48 numbers, and q8_0 has blocks of 32"):
        gguf_file._data("blk.0.ffn_up.weight", torch.ones(3, 48), "q8_0")


def test_rows_of_a_llama_are_put_into_pairs() -> None:
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    rows = torch.arange(8.0)[:, None]
    # Two heads of four: rotation takes rows 0 and 2 together, then 1 and 3; in the file such rows are neighbours.
    query = gguf_file._permuted(config, "model.layers.0.self_attn.q_proj.weight", rows)
    assert query[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    key = gguf_file._permuted(config, "model.layers.0.self_attn.k_proj.weight", rows)
    assert key[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    other = gguf_file._permuted({**config, "model_type": "qwen3"}, "model.layers.0.self_attn.q_proj.weight", rows)
    assert other is rows and gguf_file._permuted(config, "model.layers.0.self_attn.v_proj.weight", rows) is rows


def test_names_of_tensors_and_those_that_are_unknown() -> None:
    assert gguf_file._name("model.layers.3.mlp.up_proj.weight") == "blk.3.ffn_up.weight"
    assert gguf_file._name("lm_head.weight") == "output.weight"
    for name in ("model.layers.3.self_attn.q_proj.lora.weight", "model.rotary.inv_freq", "weight"):
        with pytest.raises(ModelError, match="no name for it is known"):
            gguf_file._name(name)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma2", "rope_parameters": {"rope_type": "default"}},
        {"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}},
    ],
)
def test_a_model_that_the_file_would_misstate_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"leave llama\.cpp out"):
        gguf_file._check(config)


def test_every_peer_names_a_function_that_is_there() -> None:
    functions = {
        "core_cpu.peers.inductor:freezing": inductor.freezing,
        "core_cpu.peers.inductor:ahead_of_time": inductor.ahead_of_time,
        "core_cpu.peers.onnx_runtime:session": onnx_runtime.session,
        "core_cpu.peers.llama_cpp:context": llama_cpp.context,
        "core_cpu.peers.ipex_llm:traced": ipex_llm.traced,
    }
    assert {peer.runner for peer in PEERS} == set(functions)


def test_rates_of_reading_leave_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_BYTES", 2**16)
    torch.set_num_threads(2)
    rates = reading.read_rates()
    assert set(rates) == {1, 2} and all(rate > 0 for rate in rates.values()) and torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert set(reading.read_rates()) == {1}
