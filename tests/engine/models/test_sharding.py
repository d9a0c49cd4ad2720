"""core/engine/models/sharding/: parts of parameters, plans that are completed, and models of several types in parts."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.engine.models.loading import build_model
from core.engine.models.sharding import cut_parameters, planned, shard_model
from core.engine.models.sharding.cuts import Cut
from core.engine.models.sharding.gathering import is_pointwise
from core.engine.models.tiny import tiny_config
from core.errors import UsageError
from tests.common.processes import launch, pretended
from tests.support import refused


@functools.cache
def _tiny(name: str, **changes: Any) -> Any:
    return build_model(tiny_config(name, **changes), torch_device=torch.device("cpu"), dtype=torch.float32).model


def tiny(name: str, **changes: Any) -> Any:
    return copy.deepcopy(_tiny(name, **changes))


@given(
    dim=st.integers(0, 2),
    blocks=st.integers(1, 3),
    copies=st.integers(1, 2),
    shares=st.integers(1, 4),
    size=st.integers(1, 3),
)
def test_the_parts_of_all_processes_are_the_whole(dim: int, blocks: int, copies: int, shares: int, size: int) -> None:
    cut, count = Cut(dim=dim, blocks=blocks, copies=copies), shares * copies
    shape = [2, 3, 4]
    shape[dim] = blocks * shares * size
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    parts = [cut.of(whole, rank, count) for rank in range(count)]
    assert cut.divides(shape[dim], count)
    assert {tuple(part.shape) for part in parts} == {cut.shape(tuple(shape), count)}
    assert all(torch.equal(part, parts[rank - rank % copies]) for rank, part in enumerate(parts))
    # Block by block, the parts follow each other.
    chunks = [torch.cat([part.chunk(blocks, dim)[b] for part in parts[::copies]], dim) for b in range(blocks)]
    assert torch.equal(torch.cat(chunks, dim), whole)


@pytest.mark.parametrize(
    ("cut", "size", "count", "divides"),
    [
        (Cut(dim=0), 6, 3, True),
        (Cut(dim=0), 6, 4, False),
        (Cut(dim=0, blocks=2), 6, 2, False),  # a part would hold gates and ups in other numbers
        (Cut(dim=0, blocks=2), 12, 2, True),
        (Cut(dim=0, copies=2), 6, 4, True),
        (Cut(dim=0, copies=2), 6, 3, False),
        (Cut(dim=None), 5, 4, True),
    ],
)
def test_sizes_that_processes_divide(cut: Cut, size: int, count: int, divides: bool) -> None:
    assert cut.divides(size, count) == divides


def test_what_the_first_process_holds_is_zero_elsewhere() -> None:
    whole = torch.tensor([1.0, 2.0])
    assert [Cut(dim=None).of(whole, rank, 2).tolist() for rank in range(2)] == [[1.0, 2.0], [0.0, 0.0]]


def test_the_embedding_and_a_head_that_shares_its_weight_are_cut_together() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    model.tp_plan = {"model.layers.*.mlp.up_proj": "colwise"}  # older versions of transformers name neither
    plan = planned(model, 2)
    assert plan.plan["model.embed_tokens"] == "embedding_rowwise" and plan.plan["lm_head"] == "colwise_gather_output"
    assert {"model.embed_tokens", "lm_head"} <= plan.added
    with pretended():
        shard_model(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tuple(model.lm_head.weight.shape) == (80, 64) and model.model.embed_tokens.num_embeddings == 160


def test_a_vocabulary_that_processes_do_not_divide_stays_whole_and_is_told() -> None:
    model = tiny("llama", vocab_size=161)
    plan = planned(model, 2)
    reason = "161 rows, which 2 processes do not divide"
    assert plan.whole == {"model.embed_tokens": reason, "lm_head": reason}
    assert "lm_head: 161 rows" in plan.facts()["whole"]
    with pretended():
        shard_model(model)
    assert tuple(model.lm_head.weight.shape) == (161, 64) and model.model.layers[0].mlp.up_proj.out_features == 48


def test_processes_share_key_heads_of_which_there_are_fewer() -> None:
    model = tiny("llama", num_attention_heads=8, num_key_value_heads=2)
    before = model.model.layers[0].self_attn.k_proj.weight.clone()
    with pretended(4):
        cuts = cut_parameters(model, planned(model, 4).plan, 4)
        shard_model(model)
    attention = model.model.layers[0].self_attn
    assert cuts["model.layers.0.self_attn.k_proj.weight"] == Cut(dim=0, copies=2)
    assert cuts["model.layers.0.self_attn.q_proj.weight"] == Cut(dim=0)
    assert torch.equal(attention.k_proj.weight, before[: len(before) // 2])
    assert attention.num_key_value_groups == 2, "two of eight heads of queries, and one of keys"


@pytest.mark.parametrize(("heads", "keys", "count"), [(6, 2, 3), (4, 2, 8)])
def test_heads_that_cannot_be_cut_or_shared_are_refused(heads: int, keys: int, count: int) -> None:
    model = tiny("llama", hidden_size=96, head_dim=16, num_attention_heads=heads, num_key_value_heads=keys)
    with pretended(count), refused(UsageError, f"which {count} processes do not divide"):
        shard_model(model)


def test_experts_are_cut_by_width_as_they_say_they_are_laid_out() -> None:
    # gpt_oss: transposed, gate and up in turn, with biases; transformers has no plan for it.
    model = tiny("gpt_oss")
    plan, layer = planned(model, 2), "model.layers.0.mlp.experts"
    cuts = cut_parameters(model, plan.plan, 2)
    assert {name: cuts[f"{layer}.{name}"] for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj")} == {
        "gate_up_proj": Cut(dim=2),
        "gate_up_proj_bias": Cut(dim=1),
        "down_proj": Cut(dim=1),
    }
    assert cuts[f"{layer}.down_proj_bias"] == Cut(dim=None), "it is added once"
    assert cuts["model.layers.0.self_attn.sinks"] == Cut(dim=0)
    assert cuts["model.layers.0.self_attn.o_proj.bias"] == Cut(dim=None)
    mixture = planned(tiny("qwen3_moe"), 2)
    assert cut_parameters(tiny("qwen3_moe"), mixture.plan, 2)[f"{layer}.gate_up_proj"] == Cut(dim=1, blocks=2)
    own = "transformers' own plan has the others; before 5.23 the embedding is none of them"
    assert mixture.added <= {"model.embed_tokens"}, own


def test_experts_are_divided_by_their_number_where_that_is_asked_for_or_their_width_is_odd() -> None:
    layer = "model.layers.0.mlp.experts"
    for name in ("gpt_oss", "qwen3_moe"):
        model = tiny(name)
        found = cut_parameters(model, planned(model, 2, "number").plan, 2)
        own = {key.rpartition(".")[2] for key, _ in model.model.layers[0].mlp.experts.named_parameters()}
        assert {f"{layer}.{each}": Cut(dim=0) for each in own}.items() <= found.items()
    model = tiny("qwen3_moe", moe_intermediate_size=33)
    assert planned(model, 2).plan["model.layers.*.mlp.experts"] == "ep_dispatch_experts"
    before = model.model.layers[0].mlp.experts.num_experts
    with pretended():
        shard_model(model)
    experts = model.model.layers[0].mlp.experts
    assert experts.num_experts == experts.gate_up_proj.shape[0] == before // 2
    assert tuple(experts.down_proj.shape[1:]) == (64, 33)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_what_is_left_in_rows_of_experts_elsewhere_adds_nothing(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import moe

    grouped = moe._grouped_mm

    def leaves_nan(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = grouped(rows, weight, offs)
        behind = torch.arange(len(rows)) >= offs[-1]
        return out.masked_fill(behind[:, None], torch.nan)  # as memory may hold that nobody wrote

    monkeypatch.setattr(moe, "_grouped_mm", leaves_nan)
    model = tiny(name)
    model.set_experts_implementation(implementation)
    with pretended():
        shard_model(model, planned(model, 2, "number").plan)
        with torch.no_grad():
            experts, hidden = model.model.layers[0].mlp.experts, torch.ones(3, 64)
            count, (own, both) = experts.num_experts, torch.tensor([[[0, 1]] * 3, [[0, 1], [0, 9], [9, 8]]])
            found = [experts(hidden, each.clamp(max=2 * count - 1), torch.ones(3, 2)) for each in (own, both)]
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)  # other numbers of rows
    assert torch.isfinite(found[1]).all() and not found[1][2].any() and found[1][1].any()


def test_experts_without_a_gate_are_cut_in_one_block_and_by_number() -> None:
    layer = "model.layers.1.mixer.experts"
    for planless in (False, True):
        model = tiny("nemotron_h")
        model.tp_plan = {} if planless else model.tp_plan  # what core adds where transformers has no plan
        by_width = cut_parameters(model, planned(model, 2).plan, 2)
        assert {name: by_width[f"{layer}.{name}"] for name in ("up_proj", "down_proj")} == {
            "up_proj": Cut(dim=1),
            "down_proj": Cut(dim=2),
        }
        by_number = cut_parameters(model, planned(model, 2, "number").plan, 2)
        assert {by_number[f"{layer}.{name}"] for name in ("up_proj", "down_proj")} == {Cut(dim=0)}
    model = tiny("nemotron_h", moe_intermediate_size=33)
    assert planned(model, 2).plan["model.layers.*.mixer.experts"] == "ep_dispatch_experts"
    model.get_submodule(layer).gate_proj = torch.nn.Parameter(torch.zeros(4, 33, 64))
    model.tp_plan = {}
    assert not any("experts" in line for line in planned(model, 2).plan), "not laid out as core knows it"


def test_a_number_of_experts_that_processes_do_not_divide_is_refused() -> None:
    model = tiny("qwen3_moe")
    count = model.model.layers[0].mlp.experts.num_experts + 1
    with pretended(count), refused(UsageError, f"which {count} processes do not divide"):
        shard_model(model, planned(model, count, "number").plan)


def test_attention_that_normalises_all_heads_together_is_left_whole() -> None:
    model = tiny("llama")
    model.tp_plan = {"lm_head": "colwise_gather_output"}
    assert "model.layers.*.self_attn.q_proj" in planned(model, 2).added
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.RMSNorm(64)
    mlp = {f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")}  # of its graph
    assert planned(model, 2).added == {"model.embed_tokens", *mlp}


def test_a_copy_of_a_sharded_model_is_one() -> None:
    model = tiny("llama")
    with pretended() as group:
        shard_model(model)
        again = copy.deepcopy(model)
        embedding = again.model.embed_tokens
        assert embedding.group == "" and isinstance(embedding, type(model.model.embed_tokens)) and group
        ids = torch.tensor([[3, 90]])
        found, held = embedding(ids), embedding.weight
        assert torch.equal(found[0, 0], held[3]) and not found[0, 1].any(), "the other process has token 90"


MODELS = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss", "glm4", "phi3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "changes"), [(2, {}), (4, {"num_attention_heads": 8, "num_key_value_heads": 2})], ids=["2", "4"]
)
def test_models_in_parts_give_the_logits_of_the_whole(size: int, changes: dict[str, Any]) -> None:
    asked = {"models": MODELS if size == 2 else MODELS[:6], "dtypes": ["float32", "bfloat16"], "changes": changes}
    for found in launch("tests.engine.models.plan_worker", json.dumps(asked), size=size):
        wrong = {name: each for name, each in found.items() if not each.get("passed")}
        assert wrong == {}
        shares = {name: each["share"] for name, each in found.items()}
        assert max(shares.values()) < 0.6, shares


@pytest.mark.parametrize(
    ("follows", "found"),
    [
        (lambda x: x, True),
        (lambda x: torch.tanh(x / 30.0) * 30.0, True),
        (lambda x: x.log_softmax(-1), False),
        (lambda x: x + torch.linspace(0.0, 1.0, x.shape[-1]), False),
        (lambda x: x[..., :9], False),  # rows that pad the vocabulary
        (lambda x: x[..., :8], False),
        (lambda x: x.index_fill(-1, torch.tensor([7]), -torch.inf), False),
        (lambda x: x.repeat(1, 2), False),
    ],
    ids=["nothing", "cap", "log softmax", "bias", "padding", "much padding", "masked token", "wider"],
)
def test_what_follows_a_head_is_found_to_be_done_to_each_logit_alone_or_not(follows: Any, found: bool) -> None:
    head = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    for number, part in enumerate(head.chunk(2, -1)):
        assert is_pointwise(follows(head), follows(part.repeat(1, 2)), width=6, number=number, size=2) is found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_are_elsewhere_are_added_by_others(size: int, dtype: str) -> None:
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    if dtype == "bfloat16":  # all four are chosen: of two that are nearly equal, rounding would choose another one
        changes["num_experts_per_tok"] = 4
    asked = {"models": ["qwen3_moe", "mixtral", "gpt_oss"], "dtypes": [dtype], "changes": changes}
    for found in launch("tests.engine.models.plan_worker", json.dumps({**asked, "experts": "number"}), size=size):
        assert {name: each for name, each in found.items() if not each.get("passed")} == {}
        assert max(each["share"] for each in found.values()) < 1.2 / size


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["width", "number"])
def test_experts_without_a_gate_in_parts_give_the_logits_of_the_whole(experts: str) -> None:
    changes = {"num_experts_per_tok": 4}  # all: of two that are nearly equal, rounding would choose another one
    asked = {"models": ["nemotron_h"], "dtypes": ["float32", "bfloat16"], "changes": changes, "experts": experts}
    for found in launch("tests.engine.models.plan_worker", json.dumps(asked), size=2):
        assert {name: each for name, each in found.items() if not each.get("passed")} == {}
        assert all(each["share"] < 0.9 for each in found.values()), "state spaces stay whole"


@pytest.mark.slow
def test_a_plan_that_is_wrong_for_a_type_is_found_before_text_is_made() -> None:
    """gemma3n takes a mean and a deviation over the width of its MLP, which transformers' plan cuts."""
    asked = {"models": [], "dtypes": [], "tried": ["llama", "gpt_oss", "gemma3n_text", "mamba2"]}
    for found in launch("tests.engine.models.plan_worker", json.dumps(asked), size=2):
        assert found["trial of llama"] == found["trial of gpt_oss"] == ""
        assert "gives other logits than whole: error over bound" in found["trial of gemma3n_text"]
        assert found["trial of gemma3n_text"].startswith("UsageError")
        assert "it has no plan of its own" in found["trial of mamba2"]
