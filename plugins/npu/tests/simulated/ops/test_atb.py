"""ATB's ops through the real libop_plugin_atb: numbers against plain torch, tensors of the host, graphs and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from npu_atb import Call, names, placed, run, sample
from npu_kernel_cases import npu
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from simulator import runtime

pytestmark = pytest.mark.npu_sim


def calls(op: str) -> list[Any]:
    return [pytest.param(op, name, id=f"{op}, {name}") for name in names(op)]


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return (S, N, V) by torch's own attention, in fp64."""
    q, k, v = (each.double().transpose(0, 1)[None] for each in (query, keys, values))
    bias = None if mask is None else mask.double()
    return scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def late(queries: int, keys: int) -> Tensor:
    """Return the mask of queries that stand at the end of the keys."""
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return torch.zeros(queries, keys).masked_fill(~seen, -torch.inf)


def pages(cache: Tensor, row: Tensor, length: int) -> Tensor:
    return torch.stack([cache[int(row[at // cache.shape[1]]), at % cache.shape[1]] for at in range(length)])


def in_parts(rows: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return list(rows.split(list(lengths)))


def packed(call: Call) -> Tensor:
    lengths = [int(each) for each in call["seq_len"]]
    rows = zip(*(in_parts(call[name], lengths) for name in ("query", "key", "value")), strict=True)
    mask = call.get("mask")

    def masked(length: int) -> Tensor | None:
        return None if mask is None else mask[..., :length, :length]

    return torch.cat([attend(q, k, v, call["scale_value"], masked(len(q))) for q, k, v in rows])


def prefixed(call: Call) -> Tensor:
    caches = [call[name] for name in ("key_cache", "value_cache")]
    if caches[0].shape[-1] == 16:
        heads = call["num_kv_heads"]
        caches = [each.transpose(1, 2).reshape(len(each), each.shape[2], heads, -1) for each in caches]
    lengths = [int(each) for each in call["context_lens"]]
    made = []
    for index, query in enumerate(in_parts(call["query"], [int(each) for each in call["seq_len"]])):
        keys, values = (pages(cache, call["block_table"][index], lengths[index]) for cache in caches)
        made.append(attend(query, keys, values, call["scale_value"], late(len(query), lengths[index])))
    return torch.cat(made)


def decoded(call: Call) -> Tensor:
    made = []
    for index, length in enumerate(int(each) for each in call["context_lens"]):
        keys = pages(call["key_cache"], call["block_table"][index], length)
        values = keys[..., : call["mla_vheadsize"]] if "mla_vheadsize" in call else None
        if values is None:
            values = pages(call["value_cache"], call["block_table"][index], length)
        mask = call["mask"][index][..., :length] if "mask" in call else None
        made.append(attend(call["query"][index][None], keys, values, call["scale_value"], mask))
    return torch.cat(made)


def decoded_codes(call: Call) -> Tensor:
    """Attend with what the codes stand for, by a scale for each head."""
    made = []
    for index, length in enumerate(call["context_lens"].tolist()):
        keys, values = (pages(call[name], call["block_table"][index], length) for name in ("key_cache", "value_cache"))
        group = call["num_heads"] // call["num_kv_heads"]
        keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
        keys, values = keys * call["k_descale"][:, None], values * call["v_descale"][:, None]
        made.append(attend(call["query"][index][None], keys, values, call["scale_value"]))
    return torch.cat(made)


def latent(call: Call) -> Tensor:
    made = []
    for index, length in enumerate(call["context_lens"]):
        values, rotary = (pages(call[name], call["block_tables"][index], length) for name in ("ctkv", "k_rope"))
        query = torch.cat((call["q_nope"][index], call["q_rope"][index]), -1)[None]
        made.append(attend(query, torch.cat((values, rotary), -1), values, call["qk_scale"]))
    return torch.cat(made)


ATTENTION: dict[str, tuple[str, Callable[[Call], Tensor]]] = {
    "atb::_npu_flash_attention": ("out", packed),
    "atb::_npu_flash_attention_unpad": ("out", packed),
    "atb::_npu_flash_attention_unpad_v2": ("out", packed),
    "atb::_npu_flash_attention_v2.out": ("out", packed),
    "atb::_npu_flash_attention_v3": ("out", packed),
    "atb::_npu_flash_attention_qlens": ("out", prefixed),
    "atb::_npu_flash_attention_prefix_v2.out": ("out", prefixed),
    "atb::_npu_paged_attention_splitfuse": ("out", prefixed),
    "atb::_npu_paged_attention_splitfuse_v2": ("out", prefixed),
    "atb::_npu_paged_attention": ("out", decoded),
    "atb::_npu_paged_attention_mla": ("out", decoded),
    "atb::_npu_paged_attention_v2.out": ("out", decoded),
    "atb::npu_multi_head_latent_attention.out": ("output", latent),
    "atb::npu_multi_head_latent_attention.lse_out": ("output", latent),
}


@pytest.mark.parametrize(("op", "name"), [each for op in ATTENTION for each in calls(op)])
def test_attention_gives_what_torch_s_own_gives(op: str, name: str) -> None:
    out, reference = ATTENTION[op]
    call = sample(op, name)
    given = placed(op, call)
    run(op, given)
    torch.testing.assert_close(given[out].cpu().double(), reference(call), rtol=2e-3, atol=2e-3)


def test_attention_of_codes_is_that_of_the_values_they_stand_for() -> None:
    op = "atb::_npu_paged_attention_quant"
    call = sample(op, "codes")
    given = placed(op, call)
    run(op, given)
    wanted = decoded_codes(call)
    # Probabilities become codes of 8 bits on the way.
    assert (given["out"].cpu().double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("name", ["the first block", "a block behind others"])
@pytest.mark.parametrize("op", ["atb::npu_ring_mla", "atb::npu_ring_mla.out"])
def test_blocks_merge_by_their_log_sums(op: str, name: str) -> None:
    call = sample(op, name)
    given = placed(op, call)
    out, log_sum = run(op, given)
    lengths = call["seqlen"].tolist()
    query, key = (torch.cat((call[f"{side}_nope"], call[f"{side}_rope"]), -1) for side in "qk")
    parts = [in_parts(each, lengths) for each in (query, key, call["value"])]
    products = [
        torch.einsum("snd,lnd->nsl", q.double(), k.double().repeat_interleave(2, 1))
        for q, k in zip(*parts[:2], strict=True)
    ]
    scores = [each * call["qk_scale"] + late(*each.shape[1:]) for each in products]
    own = torch.cat([each.exp().sum(-1) for each in scores], dim=-1)
    values = [v.double().repeat_interleave(2, 1) for v in parts[2]]
    total = torch.cat([torch.einsum("nsl,lnv->snv", s.exp(), v) for s, v in zip(scores, values, strict=True)])
    if "pre_out" in call:
        before = call["prev_lse"].double().exp()
        total, own = total + call["pre_out"].double() * before.t()[..., None], own + before
    torch.testing.assert_close(out.cpu().double(), total / own.t()[..., None], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(log_sum.cpu().double(), own.log(), rtol=1e-5, atol=1e-5)


def test_a_prefix_in_pages_is_attended_to() -> None:
    op = "atb::npu_self_attention_prefix_encoder.out"
    call = sample(op, "a prefix")
    given = placed(op, call)
    run(op, given)
    names = {"key": "key_cache", "value": "value_cache", "seqlen": "seq_len", "kv_seqlen": "context_lens"}
    names |= {"block_tables": "block_table", "qk_scale": "scale_value", "kv_headnum": "num_kv_heads"}
    wanted = prefixed({names.get(key, key): value for key, value in call.items()})
    torch.testing.assert_close(given["output"].cpu().double(), wanted, rtol=2e-3, atol=2e-3)


def test_the_second_version_of_torch_npu_s_attention_gives_what_the_first_gives() -> None:
    first, second = "npu::npu_fused_infer_attention_score.out", "npu::npu_fused_infer_attention_score_v2.out"
    calls = [placed(op, sample(op, "pages")) for op in (first, second)]
    for op, call in zip((first, second), calls, strict=True):
        call["out"] = [each.to(npu()) for each in call["out"]]
        run(op, call)
    assert torch.equal(calls[0]["out"][0], calls[1]["out"][0])
    ends, lengths = [0, *calls[0]["actual_seq_lengths"]], calls[0]["actual_seq_lengths_kv"]
    host = sample(first, "pages")
    for index, length in enumerate(lengths):
        part = slice(ends[index], ends[index + 1])
        keys, values = (pages(host[name], host["block_table"][index], length) for name in ("key", "value"))
        wanted = attend(host["query"][part], *(each.view(length, 2, -1) for each in (keys, values)), host["scale"])
        torch.testing.assert_close(calls[1]["out"][0][part].cpu().double(), wanted, rtol=2e-3, atol=2e-3)


def test_a_graph_replays_atb_s_kernels_and_renews_their_lengths() -> None:
    op = "atb::_npu_paged_attention_v2.out"
    call = placed(op, sample(op, "pages"))
    longer = {**call, "context_lens": [200, 77], "out": torch.empty_like(call["out"])}
    run(op, longer)
    graph, event, side = torch.npu.NPUGraph(), torch.npu.ExternalEvent(), torch.npu.Stream()
    runtime.clear()
    with torch.npu.graph(graph, capture_error_mode="thread_local"):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.ops.atb._npu_paged_attention_v2.out(**call)
        handle = torch.npu.graph_task_group_end(stream)
    assert runtime.kernels("capture") == ["AtbPagedAttention"]
    with torch.npu.stream(side):
        torch.npu.graph_task_update_begin(side, handle)
        torch.ops.atb._npu_paged_attention_v2.out(**{**call, "context_lens": [200, 77]})
        torch.npu.graph_task_update_end(side)
        event.record(side)
    graph.replay()
    torch.npu.synchronize()
    assert torch.equal(call["out"], longer["out"])


def test_lengths_of_the_host_may_go_after_the_call() -> None:
    op = "atb::_npu_paged_attention"
    call = {key: value for key, value in placed(op, sample(op, "pages")).items() if key != "context_lens"}
    lengths = torch.tensor([131, 4], dtype=torch.int32)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, capture_error_mode="thread_local"):
        torch.ops.atb._npu_paged_attention(**call, context_lens=lengths)
    lengths.fill_(99)
    del lengths
    graph.replay()
    torch.npu.synchronize()
    wanted = decoded(sample(op, "pages"))
    torch.testing.assert_close(call["out"].cpu().double(), wanted, rtol=2e-3, atol=2e-3)


def test_a_kernel_that_fails_is_told_at_the_call() -> None:
    op = "atb::_npu_paged_attention"
    call = placed(op, sample(op, "pages"))
    runtime.fail_next("AtbPagedAttention", 507035)
    with pytest.raises(RuntimeError, match=r"AtbPagedAttention, error code 507035: .*injected by a test"):
        run(op, call)
    run(op, call)


def test_what_is_not_simulated_fails_at_the_call() -> None:
    op = "atb::_npu_flash_attention_v2.out"
    call = {**placed(op, sample(op, "slopes")), "mask_type": 4}
    call["slopes"] = torch.ones(4, device=npu())
    with pytest.raises(RuntimeError, match="mask 4 is not simulated"):
        run(op, call)
