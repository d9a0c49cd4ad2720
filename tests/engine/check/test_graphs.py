"""core/engine/check/graphs.py: the graphs of both phases, and inputs that each of them serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.declaration import find_op
from core.engine.check.graphs import engine_graphs, phase_graphs
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.errors import ModelError, UsageError
from core.host.selection import select_device
from core.verify.execution import run_graph
from tests.support import refused


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.slow
def test_each_phase_serves_inputs_of_another_order_and_prefill_of_another_length(llama: LoadedModel) -> None:
    prefill, decode = phase_graphs(llama, select_device("cpu"))
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    lengths = [[inputs["input_ids"].shape[1] for inputs in graph.examples] for graph in (prefill, decode)]
    assert lengths == [[7, 5], [1, 1]]
    for graph in (prefill, decode):
        first, second = graph.values()
        for inputs in graph.examples:
            assert graph.traced.why_not_for(inputs) is None
        # Running copies what is written, so that the caches are as they were for the next run.
        (logits,) = run_graph(graph.traced.module, first).outputs
        (again,) = run_graph(graph.traced.module, first).outputs
        (other,) = run_graph(graph.traced.module, second).outputs
        assert torch.equal(logits, again)
        if graph is prefill:
            torch.testing.assert_close(other.flip(0), logits[:, : other.shape[1]], rtol=1e-4, atol=1e-5)
        else:  # each token now follows the other sequence
            assert not torch.allclose(other.flip(0), logits, atol=1e-2)


def test_only_the_phases_asked_for_are_traced(llama: LoadedModel) -> None:
    assert [graph.phase for graph in phase_graphs(llama, select_device("cpu"), phases=("decode",))] == ["decode"]


def test_a_model_without_a_static_cache_is_refused(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no such cache")

    monkeypatch.setattr("core.engine.check.graphs.static_phases", refuse)
    with pytest.raises(ModelError, match="ValueError: no such cache"):
        phase_graphs(llama, select_device("cpu"))


@pytest.mark.slow
def test_the_engines_graphs_are_those_of_the_paged_cache_where_there_is_one(llama: LoadedModel) -> None:
    before = llama.config._attn_implementation
    with engine_graphs(llama, select_device("cpu")) as graphs:
        assert [graph.phase for graph in graphs] == ["prefill", "decode"]
        for graph in graphs:
            assert graph.cache.startswith("paged: all 2 attention layers")
            ops = [node for node in graph.traced.module.graph.nodes if find_op(node.target) is ATTENTION]
            assert len(ops) == 2 and len(graph.examples) == 2
            first, second = (graph.traced.module(*values)[0] for values in graph.values())
            assert first.shape == second.shape and not torch.equal(first, second)
    assert llama.config._attn_implementation == before
    with engine_graphs(llama, select_device("cpu"), cache="static", phases=("decode",)) as (decode,):
        assert decode.cache == "static: asked for; up to 8 sequences at once"


@pytest.mark.slow
def test_graphs_that_are_looked_at_alone_say_nothing_of_how_prompts_run() -> None:
    model = build_model(tiny_config("lfm2"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with engine_graphs(model, select_device("cpu"), phases=("decode",)) as (decode,):
        assert decode.cache.startswith("paged: ") and "in slots, and prompts share no beginning" in decode.cache
        assert "eagerly" not in decode.cache


@pytest.mark.slow
def test_a_model_that_can_not_be_paged_has_static_graphs_with_the_reason() -> None:
    model = build_model(tiny_config("codegen"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with engine_graphs(model, select_device("cpu"), phases=("decode",)) as (decode,):
        assert decode.cache.startswith("static: no paged cache: ")
        assert decode.cache.endswith("; up to 8 sequences at once")
    asked = engine_graphs(model, select_device("cpu"), cache="paged")
    with refused(UsageError, "on the paged cache", "ask for cache 'static'"), asked:
        pass


@pytest.mark.slow
def test_a_model_without_a_cache_has_one_graph_of_whole_sequences() -> None:
    model = build_model(tiny_config("gpt_neo"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with engine_graphs(model, select_device("cpu")) as (decode,):
        assert decode.phase == "decode" and decode.cache.startswith("recompute: it can't be paged (GPTNeoForCausalLM")
        assert decode.cache.endswith("with the square of the length; up to 8 sequences at once")
        first, second = (decode.traced.module(*values)[0] for values in decode.values())
        assert first.shape == second.shape and not torch.equal(first, second)
    only_prompts = engine_graphs(model, select_device("cpu"), phases=("prefill",))
    with refused(UsageError, "computes prompts as it decodes", "ask for decode"), only_prompts:
        pass
    with engine_graphs(model, select_device("cpu"), cache="static", phases=("decode",)) as (decode,):
        assert "static: asked for; the engine does not serve it: " in decode.cache


def test_a_model_without_a_cache_that_runs_eagerly_has_no_graph() -> None:
    model = build_model(tiny_config("xlm"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with (
        refused(ModelError, "without padding, eagerly", "core run serves it"),
        engine_graphs(model, select_device("cpu")),
    ):
        pass


@pytest.mark.slow
def test_a_model_with_recurrent_states_has_paged_graphs() -> None:
    model = build_model(tiny_config("lfm2"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with engine_graphs(model, select_device("cpu")) as graphs:
        targets = {graph.phase: str([node.target for node in graph.traced.module.graph.nodes]) for graph in graphs}
        assert all(graph.cache.startswith("paged: ") and "recurrent states" in graph.cache for graph in graphs)
    assert "index_copy" in targets["decode"] and "token_states" not in targets["decode"]
    assert "keep_token_states" in targets["prefill"]


@pytest.mark.slow
def test_a_model_that_drops_states_of_prompts_has_paged_graphs_of_both_phases() -> None:
    model = build_model(tiny_config("mamba"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with engine_graphs(model, select_device("cpu"), cache="paged") as graphs:
        assert {graph.phase for graph in graphs} == {"prefill", "decode"}
