"""ATB's ops that work row by row, and the npu ops of pages, routing and sampling: numbers against plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from npu_atb import placed, run, sample
from torch import Tensor

pytestmark = pytest.mark.npu_sim


def near(codes: Tensor, values: Tensor) -> None:
    """Codes lie within half a step of what they stand for, cut off at the ends."""
    assert codes.dtype == torch.int8
    assert (codes.cpu().double() - values.clamp(-128, 127)).abs().max() <= 0.501


def test_codes_by_one_scale() -> None:
    call = sample("atb::_npu_quantize_per_tensor", "one scale")
    given = placed("atb::_npu_quantize_per_tensor", call)
    run("atb::_npu_quantize_per_tensor", given)
    near(given["y"], call["x"].double() / call["scale"].double() + call["zero_point"])


def test_codes_of_a_norm() -> None:
    call = sample("atb::_npu_quant_rms_norm", "rows")
    given = placed("atb::_npu_quant_rms_norm", call)
    run("atb::_npu_quant_rms_norm", given)
    x = call["self"].double()
    normed = torch.nn.functional.rms_norm(x, x.shape[-1:], call["gamma"].double(), 1e-5) + call["beta"].double()
    near(given["output"], normed / call["scale"].double() + call["offset"])


def test_a_product_is_added() -> None:
    call = sample("atb::_npu_matmul_add_fp32", "added")
    given = placed("atb::_npu_matmul_add_fp32", call)
    run("atb::_npu_matmul_add_fp32", given)
    torch.testing.assert_close(given["C"].cpu(), torch.addmm(call["C"], call["x"].float().t(), call["weight"].float()))


@pytest.mark.parametrize("name", ["halves", "neighbours"])
def test_rotation_turns_pairs_by_their_angle(name: str) -> None:
    call = sample("atb::_npu_rotary_embedding", name)
    given = placed("atb::_npu_rotary_embedding", call)
    run("atb::_npu_rotary_embedding", given)
    cos, sin = call["cos_sin_cache"].double()[call["positions"]].chunk(2, -1)
    turn = torch.complex(cos, sin)[:, None]
    for which in ("query", "key"):
        x = call[which].double().unflatten(-1, (-1, call["head_size"]))
        pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if name == "halves" else x.unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        wanted = (turned.transpose(-1, -2) if name == "halves" else turned).flatten(-2).flatten(-2)
        torch.testing.assert_close(given[which].cpu().double(), wanted, rtol=2e-3, atol=2e-3)


def best_groups(scores: Tensor, groups: int, k: int, best: int) -> Tensor:
    parts = scores.view(len(scores), groups, -1)
    chosen = parts.topk(best, -1).values.sum(-1).topk(k, -1).indices
    kept = torch.zeros(len(scores), groups, dtype=torch.bool).scatter_(1, chosen, True)
    return (parts * kept[..., None]).flatten(1)


def test_all_but_the_best_groups_become_zeros() -> None:
    call = sample("atb::_npu_group_topk", "groups")
    given = placed("atb::_npu_group_topk", call)
    run("atb::_npu_group_topk", given)
    assert torch.equal(given["self"].cpu(), best_groups(call["self"], 8, 4, 2))


def test_experts_are_weighed_by_their_share_of_the_sigmoids() -> None:
    call = sample("atb::npu_fused_add_topk_div.out", "groups")
    y, indices = run("atb::npu_fused_add_topk_div.out", placed("atb::npu_fused_add_topk_div.out", call))
    own = call["x"].double().sigmoid()
    wanted = best_groups(own + call["add_num"].double(), 8, 4, 2).topk(call["k"], -1).indices
    assert torch.equal(indices.cpu().long(), wanted)
    weights = own.gather(1, wanted)
    torch.testing.assert_close(y.cpu().double(), weights / weights.sum(-1, keepdim=True) * 2.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["atb::_npu_reshape_and_cache", "atb::_npu_reshape_and_cache_siso"])
def test_rows_go_to_their_slots(op: str) -> None:
    call = sample(op, "rows")
    given = placed(op, call)
    run(op, given)
    for name in ("key", "value") if "value" in call else ("key",):
        wanted = call[f"{name}_cache"].clone()
        wanted.flatten(0, 1)[call["slot_indices"].long()] = call[name]
        assert torch.equal(given[f"{name}_cache"].cpu(), wanted)


def test_rows_go_to_their_slots_and_a_negative_one_is_none() -> None:
    call = sample("npu::npu_scatter_pa_cache.value", "rows")
    given = placed("npu::npu_scatter_pa_cache.value", call)
    assert run("npu::npu_scatter_pa_cache.value", given) is given["key_cache"]
    wanted = call["key_cache"].clone()
    wanted.flatten(0, 1)[call["slot_mapping"][:-1].long()] = call["key"][:-1]
    assert torch.equal(given["key_cache"].cpu(), wanted)


@pytest.mark.parametrize("name", ["lengths", "running sums", "from the second page"])
@pytest.mark.parametrize(
    "op", ["atb::npu_paged_cache_load", "atb::npu_paged_cache_load.out", "npu::npu_gather_pa_kv_cache"]
)
def test_sequences_come_out_of_pages(op: str, name: str) -> None:
    call = sample(op, name)
    given = placed(op, call)
    result = run(op, given) or (given["key"], given["value"])
    table = call["block_tables" if op.startswith("npu") else "block_table"]
    lengths = call["seq_lens" if op.startswith("npu") else "context_lens"].tolist()
    if name == "running sums":
        lengths = [end - start for start, end in itertools.pairwise(lengths)]
    starts = call.get("seq_starts", call.get("seq_offset", torch.zeros(2, dtype=torch.int32))).tolist()
    for which, found in zip(("key_cache", "value_cache"), result, strict=True):
        parts = [
            call[which][row.long()].flatten(0, 1)[start : start + length]
            for row, start, length in zip(table, starts, lengths, strict=True)
        ]
        assert torch.equal(found.cpu()[: sum(lengths)], torch.cat(parts))


def test_what_goes_before_latent_attention() -> None:
    op = "atb::npu_mla_preprocess.out"
    call = sample(op, "split caches")
    q_latent, cache, q_rotary, rope_cache = (each.cpu().double() for each in run(op, placed(op, call)))
    x = {name: value.double() for name, value in call.items() if isinstance(value, Tensor)}

    def product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return rows @ (weight * scales[:, None]).t()

    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, 1e-5)

    def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rows * cos + torch.cat((-rows[..., 32:], rows[..., :32]), -1) * sin

    first = product(norm(x["input"], x["gamma0"]) + x["beta0"], x["wdqkv"], x["descale0"])
    latent, rotary, query = first.split((512, 64, 1536), -1)
    second = product(norm(query, x["gamma1"]) + x["beta1"], x["wuq"], x["descale1"])
    nope, turning = second.view(3, 4, 192).split((128, 64), -1)
    slots = call["slotmapping"].long()
    wanted = {
        "queries": (q_latent, torch.einsum("tnd,ndr->tnr", nope, x["wuk"])),
        "rotary queries": (q_rotary, rotate(turning, x["cos"][:, None], x["sin"][:, None])),
        "latent": (cache[slots // 16, slots % 16, 0], norm(latent, x["gamma2"])),
        "rotary keys": (rope_cache[slots // 16, slots % 16, 0], rotate(rotary, x["cos"], x["sin"])),
    }
    # Two roundings to codes of 8 bits and one of bf16 stand between: the error is that of the whole.
    for name, (found, true) in wanted.items():
        error = (found - true).norm() / true.norm()
        assert error < 0.03, f"{name}: {error:.3g}"
    untouched = torch.ones(64, dtype=torch.bool).index_fill(0, slots, False)
    assert torch.equal(cache.flatten(0, 1)[untouched], x["kv_cache_out0"].flatten(0, 1)[untouched])


def test_routing_turns_sorted_rows_into_codes() -> None:
    op = "npu::npu_moe_init_routing_quant"
    call = sample(op, "by row, with counts")
    codes, places, counts, _, scales = (
        each if each is None else each.cpu() for each in run(op, placed(op, call))
    )  # fmt: skip
    flat = call["expert_idx"].flatten()
    assert torch.equal(counts.long(), torch.bincount(flat, minlength=8))
    assert torch.equal(flat[places.long().argsort()], flat.sort().values), "rows lie by expert"
    rows = call["x"].repeat_interleave(2, 0).double()
    found = codes.double() * scales.double()[:, None]
    assert ((found[places.long()] - rows).abs() <= scales.double()[places.long(), None] * 0.501).all()


def test_routing_drops_what_a_block_has_no_room_for() -> None:
    op = "npu::npu_moe_init_routing_quant"
    call = sample(op, "blocks of experts, with counts")
    call["expert_idx"] = torch.zeros_like(call["expert_idx"])
    codes, places, _, before, scales = (each if each is None else each.cpu() for each in run(op, placed(op, call)))
    assert before.tolist() == [14, 0, 0, 0, 0, 0, 0, 0]
    assert places.tolist() == [0, 1, 2, *[-1] * 11]
    found = codes[0].double() * scales.view(8, 3)[0].double()[:, None]
    torch.testing.assert_close(found, call["x"][[0, 0, 1]].double(), rtol=0, atol=float(scales.max()) / 2 + 1e-6)
    assert not codes[1:].any()


def test_sampling_keeps_the_most_probable_and_takes_the_best_by_noise() -> None:
    op = "npu::npu_top_k_top_p_sample"
    call = sample(op, "with logits")
    chosen, kept = (each.cpu() for each in run(op, placed(op, call)))
    rows = zip(call["logits"].float(), call["top_k"].tolist(), call["top_p"], strict=True)
    for row, (logits, k, p) in enumerate(rows):
        order = logits.argsort(descending=True, stable=True)[:k]
        probabilities = logits[order].softmax(-1)
        order = order[(probabilities.cumsum(-1) - probabilities) < float(p)]
        assert torch.equal(kept[row].isfinite().nonzero().flatten(), order.sort().values)
        assert torch.equal(kept[row][order], logits[order])
        by_noise = logits[order].softmax(-1) / (call["q"][row, : len(order)] + 1e-8)
        assert chosen[row] == order[by_noise.argmax()]


def test_kernels_by_the_name_of_the_operator() -> None:
    call = sample("npu::npu_silu_", "rows that lie apart")
    given = placed("npu::npu_silu_", call)
    run("npu::npu_silu_", given)
    wanted = torch.nn.functional.silu(call["input"].float())
    torch.testing.assert_close(given["input"].cpu().float(), wanted, rtol=1e-3, atol=1e-3)
    call = placed("npu::npu_transpose.out", sample("npu::npu_transpose.out", "turned"))
    run("npu::npu_transpose.out", call)
    assert torch.equal(call["out"], call["input"].permute(2, 0, 1))
