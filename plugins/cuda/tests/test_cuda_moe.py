"""core_cuda/ops/moe/{route,grouped_mlp}.py against the references of the canonical ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import MIN_ELEMENTS, judge_pooled
from core.common.ops.implementation import OpCall
from core.common.ops.moe.experts import GROUPED_MLP
from core.common.ops.moe.route import MOE_ROUTE
from tests.kernel_cases import CPU, DTYPES, check, faked, in_fp64, laid_out, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops.activation import Gate
from core_cuda.ops.moe import grouped_sort
from core_cuda.ops.moe.grouped_configs import GroupedConfig, GroupedShape, Tile, candidates, default_config
from core_cuda.ops.moe.grouped_mlp import Experts, grouped_mlp, grouped_mlp_condition, run_grouped_mlp
from core_cuda.ops.moe.route import moe_route, route_condition

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
Call = dict[str, Any]


def refused(op: Any, condition: Any, call: Call) -> str | None:
    defaults = {a.name: a.default_value for a in op.overload._schema.arguments if a.has_default_value()}
    return condition(OpCall(op=f"core::{op.name}", args={**defaults, **call}))


def routed(calls: list[Call], device: torch.device) -> None:
    """Expect the reference's experts in its order, and judge the weights of all calls together."""
    judged: list[tuple[Tensor, Tensor, Tensor]] = []
    for call in calls:
        assert refused(MOE_ROUTE, route_condition, call) is None
        results, (wanted, experts) = moe_route(**moved(call, device)), MOE_ROUTE.reference(**call)
        assert laid_out(list(results)) == laid_out(faked(MOE_ROUTE, call)), call
        assert torch.equal(results[1].cpu(), experts), call
        judged.append((results[0].cpu(), wanted, in_fp64(MOE_ROUTE, call)[0]))
    for dtype in {of[0].dtype for of in judged}:
        pool = [of for of in judged if of[0].dtype == dtype]
        if sum(of[0].numel() for of in pool) < MIN_ELEMENTS:
            for result, wanted, _ in pool:
                torch.testing.assert_close(result, wanted)
        else:
            verdict = judge_pooled(*zip(*pool, strict=True))
            assert verdict.passed, verdict


def logits(tokens: int, experts: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return logits of which no two of a token are equal."""
    order = randn(tokens, experts, dtype=torch.float64, seed=seed).argsort(-1)
    return ((order - experts * 0.6) * 0.03125).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routers_agree_with_the_reference_on_its_samples(dtype: torch.dtype, kernel_device: torch.device) -> None:
    tokens = 5 if kernel_device.type == "cpu" else 21  # the interpreter takes milliseconds for each
    samples = [sample.kwargs for sample in MOE_ROUTE.samples(dtype, CPU)]
    routed([{**call, "logits": call["logits"][:tokens]} for call in samples], kernel_device)


@pytest.mark.parametrize(
    ("experts", "scoring"),
    [(128, "softmax"), (160, "sigmoid"), (160, "softmax_selected"), (512, "softmax"), (60, "sqrtsoftplus")],
)
def test_many_experts(experts: int, scoring: str, kernel_device: torch.device) -> None:
    bias = randn(experts, scale=0.3, seed=4)
    calls: list[Call] = []
    for top_k in (2, 20):
        # No two groups of experts have the same sum, as equally spaced logits might.
        scattered = logits(3, experts, torch.float32, top_k) + randn(3, experts, scale=0.003)
        call = {"logits": scattered, "top_k": top_k, "scoring": scoring}
        calls += [call, {**call, "renormalize": True, "scale": 2.5, "out_dtype": torch.float32, "bias": bias}]
        groups = {"num_groups": 4, "top_groups": 3, "scored_per_group": 2}
        calls += [{**call, **groups}, {**call, **groups, "num_groups": 5, "bias": bias}] if experts % 5 == 0 else []
    routed(calls, kernel_device)


def test_rows_that_lie_apart(kernel_device: torch.device) -> None:
    wide = logits(6, 200, torch.bfloat16)
    calls = [wide[:, 3:131], wide[::2, :64], wide[:, :128].t().contiguous().t(), wide[:0, :8]]
    routed([{"logits": each, "top_k": 4, "renormalize": True} for each in calls], kernel_device)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_selected", "sqrtsoftplus"])
def test_values_that_are_not_finite(scoring: str, kernel_device: torch.device) -> None:
    """Weights are as eager's, and experts are different ones whatever the logits are."""
    x = logits(5, 16, torch.float32)
    x[0, 3] = x[1, 4] = torch.inf
    x[1, 5:9], x[2, :14], x[3], x[4, 7] = -torch.inf, -torch.inf, torch.nan, torch.nan
    weights, experts = moe_route(**moved({"logits": x, "top_k": 4, "scoring": scoring}, kernel_device))
    wanted, _ = MOE_ROUTE.reference(x, 4, scoring=scoring)
    torch.testing.assert_close(weights.cpu(), wanted, equal_nan=True)
    assert all(len(set(row)) == 4 and set(row) <= set(range(16)) for row in experts.tolist())


def test_equal_scores_give_the_lowest_experts(kernel_device: torch.device) -> None:
    _, experts = moe_route(torch.zeros(3, 100, device=kernel_device), 5)
    assert experts.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_experts_of_hidden_groups_are_not_chosen(kernel_device: torch.device) -> None:
    """Not even where an expert of the best groups scores minus infinity."""
    x = torch.full((1, 8), -1.0)
    x[0, 4:8] = torch.tensor([5.0, 4.0, -torch.inf, -torch.inf])
    call = {"logits": x, "top_k": 4, "scoring": "softmax_selected", "num_groups": 2, "top_groups": 1}
    weights, experts = moe_route(**moved(call, kernel_device))
    assert experts.tolist() == [[4, 5, 6, 7]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[5.0, 4.0, -torch.inf, -torch.inf]]).softmax(-1))


def test_what_the_router_refuses() -> None:
    x = torch.zeros(2, 2048, dtype=torch.bfloat16)
    for call, word in (
        ({"logits": x.double()[:, :8], "top_k": 2}, "float64"),
        ({"logits": x[:, :8].float(), "top_k": 2, "compute_dtype": torch.bfloat16}, "compute_dtype"),
        ({"logits": x, "top_k": 2}, "2048 experts"),
        ({"logits": x[:, :128], "top_k": 65}, "65 of"),
    ):
        reason = refused(MOE_ROUTE, route_condition, call)
        assert reason is not None and word in reason, call


ROW = GroupedConfig("row", Tile(32, 32), Tile(64, 32))
SWAPPED = GroupedConfig("tile", Tile(16, 16), Tile(32, 32), 16)
PLAIN = GroupedConfig("tile", Tile(32, 32), Tile(16, 16), 64)
WIDE = GroupedConfig("tile", Tile(16, 32), Tile(32, 16), 16)
HALVED = GroupedConfig("tile", Tile(16, 16), Tile(32, 32), 32, group=3, halves=True, merged=True)
CONFIGS = {"row": ROW, "swapped": SWAPPED, "plain": PLAIN, "halved": HALVED}
HALF = (torch.bfloat16, torch.float16)


def by(config: GroupedConfig | None) -> Any:
    """Return the op as computed by a configuration, by default the one that it chooses itself."""

    def computed(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, **options: Any) -> Tensor:
        if config is None:
            return grouped_mlp(x, weights, indices, gate_up, down, **options)
        if options.pop("transposed", False):
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        biases = (options.pop(name, None) for name in ("gate_up_bias", "down_bias"))
        experts = Experts(gate_up, down, *biases, gated=options.pop("gated", True))
        return run_grouped_mlp(x, weights, indices, experts, Gate(**options), config=config)

    return computed


def mixture(
    tokens: int, experts: int = 6, top_k: int = 2, hidden: int = 48, inner: int = 40, dtype: torch.dtype = HALF[0],
    *, gated: bool = True,
) -> Call:  # fmt: skip
    """Return a call in which every token chooses different experts; without a gate they are Nemotron-H's."""
    parts, activation = (2, {"kind": "silu"}) if gated else (1, {"kind": "relu2", "gated": False})
    chosen = randn(tokens, experts, seed=1).argsort(-1)[:, :top_k]
    return {
        "x": randn(tokens, hidden, dtype=dtype, seed=2),
        "weights": randn(tokens, top_k, dtype=dtype, seed=3).sigmoid(),
        "indices": chosen,
        "gate_up": randn(experts, parts * inner, hidden, dtype=dtype, seed=4, scale=0.3),
        "down": randn(experts, hidden, inner, dtype=dtype, seed=5, scale=0.3),
        **activation,
    }


def columns_first(call: Call) -> Call:
    """Return the call with the same weights, transposed, in the order of their columns."""
    turned = {name: call[name].transpose(1, 2).contiguous() for name in ("gate_up", "down")}
    return {**call, **turned, "transposed": True}


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Fill what `torch.empty` gives, so that reading what no kernel wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("config", "dtype"), [("row", HALF[0]), ("swapped", HALF[1]), ("plain", HALF[0]), ("default", HALF[1])], ids=str
)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_experts_agree_with_the_reference_on_its_samples(
    config: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    samples = {s.name: s.kwargs for s in GROUPED_MLP.samples(dtype, CPU)}
    if config == "default":  # small programs, of which the interpreter takes too many
        samples = {name: samples[name] for name in ("gpt-oss", "no tokens", "one token", "nemotron-h")}
    # One token's result of 16 elements is too small to be judged alone.
    check(GROUPED_MLP, by(CONFIGS.get(config)), [*samples.values(), mixture(1, dtype=dtype)], kernel_device)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_layouts_sizes_and_gates(config: str, kernel_device: torch.device) -> None:
    call = mixture(5)
    biases = {"gate_up_bias": randn(6, 80, dtype=HALF[0], seed=6)}
    biases["down_bias"] = randn(6, 96, dtype=HALF[0], seed=7)[:, ::2]
    merged = randn(6, 80, 2 * 48, dtype=HALF[0], seed=4, scale=0.3)
    calls = [
        {**call, "interleaved": True, "kind": "quick_gelu", "limit": 2.0, "up_offset": 1.0, **biases},
        {**columns_first(call), "kind": "relu2", **biases},
        {**columns_first(call), "down": call["down"].transpose(1, 2)},
        {**call, "gate_up": merged[:, :, 48:], "x": randn(5, 96, dtype=HALF[0], seed=2)[:, 40:88]},
        {**call, "x": randn(48, 5, dtype=HALF[0], seed=2).t(), "indices": call["indices"].t().contiguous().t()},
        {**mixture(4, hidden=17, inner=19, top_k=3), "kind": "gelu"},
        columns_first(mixture(3, hidden=65, inner=33, top_k=1)),
        {**mixture(4, hidden=17, inner=19, top_k=3, gated=False), "gate_up_bias": biases["gate_up_bias"][:, :19]},
        {**columns_first(mixture(5, gated=False)), "kind": "gelu_new", "down_bias": biases["down_bias"]},
    ]
    for each in calls:
        assert refused(GROUPED_MLP, grouped_mlp_condition, each) is None
    check(GROUPED_MLP, by(CONFIGS[config]), calls, kernel_device)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_uneven_loads(config: str, kernel_device: torch.device) -> None:
    """All tokens at one expert, tiles filled to the last row, and tokens with no expert here at all."""
    call = mixture(16, experts=4, inner=16, hidden=32)
    one, full = torch.full((16, 2), 2), torch.tensor([[0, 1]] * 16)
    none = torch.tensor([[-1, 4], [2**40, -(2**40)], [1, 9], [-1, -1]]).repeat(4, 1)
    calls = [{**call, "indices": indices} for indices in (one, full, none)]
    check(GROUPED_MLP, by(CONFIGS[config]), calls, kernel_device)
    # Nobody has chosen expert 0.
    unused = {name: call[name].clone().index_fill_(0, torch.tensor([0]), torch.nan) for name in ("gate_up", "down")}
    result = by(CONFIGS[config])(**moved({**calls[2], **unused}, kernel_device)).view(4, 4, 32)
    assert not result[:, [0, 1, 3]].any()
    assert result[:, 2].isfinite().all() and result[:, 2].all()


@pytest.mark.parametrize(("tokens", "config"), [(2, ROW), (10, WIDE)], ids=["row", "tile"])
def test_many_experts_of_many(tokens: int, config: GroupedConfig, kernel_device: torch.device) -> None:
    calls = [mixture(tokens, experts=128, top_k=8, hidden=32, inner=16, gated=gated) for gated in (True, False)]
    check(GROUPED_MLP, by(config), calls, kernel_device)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_call_again_gives_the_same_bits(config: str, kernel_device: torch.device) -> None:
    call = moved(mixture(4), kernel_device)
    first, again = (by(CONFIGS[config])(**call) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.usefixtures("unwritten_is_nan")
def test_tiles_of_prompts(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose tiles are full, half full and empty, as the default has them, sorted in two launches."""
    monkeypatch.setattr(grouped_sort, "_FEW", 0)
    calls = [mixture(230, top_k=1, hidden=72, inner=136, gated=gated) for gated in (True, False)]
    for call in calls:
        call["indices"] = torch.arange(230)[:, None] // 150 * 3  # 150 pairs of expert 0, 80 of expert 3
    config = default_config(GroupedShape(tokens=230, top_k=1, experts=2, hidden=72, inner=136))
    assert config.block_m == 128 and config.halves
    check(GROUPED_MLP, by(config), calls, kernel_device)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
def test_every_configuration_gives_the_same(gated: bool, kernel_device: torch.device) -> None:
    call = mixture(16, experts=4, hidden=96, inner=80, gated=gated)
    configs = list(candidates(GroupedShape(tokens=16, top_k=2, experts=4, hidden=96, inner=80, gated=gated)))
    assert len(configs) == len(set(configs)) > 10
    for config in configs if kernel_device.type == "cuda" else configs[1::7]:
        check(GROUPED_MLP, by(config), [call], kernel_device)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("columns", [False, True])
def test_configurations_fit_and_suit_the_number_of_pairs(columns: bool, gated: bool) -> None:
    found = []
    for tokens in (1, 8, 64, 128, 1024, 4096):
        sizes = {"experts": 128, "hidden": 2048, "inner": 768, "up_columns": columns, "down_columns": columns}
        shape = GroupedShape(tokens=tokens, top_k=8, gated=gated, **sizes)
        default = default_config(shape)
        assert default == next(candidates(shape))
        found.append((default.kernel, default.block_m))
        for config in candidates(shape):
            for tile, matrices in ((config.up, 1 + gated), (config.down, 1)):
                stage = 2 * (config.block_m + matrices * tile.block_n) * tile.block_k
                assert config.kernel == "row" or stage * tile.num_stages <= 227 * 1024, config
    assert found == [("row", 1), ("row", 1), ("tile", 16), ("tile", 16), ("tile", 128), ("tile", 128)]


def test_what_the_experts_refuse() -> None:
    call = mixture(2)
    apart = torch.empty(6, 80, 96, dtype=HALF[0])[:, :, ::2]
    for change, word in (
        ({"x": call["x"].float()}, "float32"),
        ({"weights": call["weights"].double()}, "float64"),
        ({"down": call["down"].half()}, "one dtype"),
        ({"gate_up": apart}, "neither rows nor columns of gate_up"),
        (mixture(2, experts=1500, hidden=2, inner=2), "1500 experts"),
    ):
        reason = refused(GROUPED_MLP, grouped_mlp_condition, {**call, **change})
        assert reason is not None and word in reason, word
    assert refused(GROUPED_MLP, grouped_mlp_condition, {**call, "weights": call["weights"].float()}) is None
