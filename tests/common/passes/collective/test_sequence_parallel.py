"""core/common/passes/collective: sequence and asynchronous tensor parallelism in one process; numbers elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.declaration import declared_ops
from core.common.passes.collective.sequence_parallel import SEQUENCE_PARALLEL
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.manager import PassManager
from tests.common.passes.collective import layers
from tests.common.passes.collective.layers import SIZE, Gated, Sharded, names, reasons, rewritten, traced
from tests.common.passes.collective.test_norm import Ending, Itself, PostNorm, SecondReader, WriteBetween
from tests.common.processes import drawn, pretended

NAME = "sequence_parallel"
X = drawn(1, 6, SIZE, seed=3)
LAYER = ["reduce_scatter", "add_rms_norm", "all_gather"]


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    with pretended() as name:
        yield name


def split(graph: Any, **options: Any) -> Any:
    """Run all passes but the asynchronous ones, with sequence parallelism asked for."""
    return rewritten(graph, **{"enable": (NAME,), "disable": ("async_tensor_parallel",), **options})


@pytest.mark.slow
def test_the_residual_stays_split_from_the_first_layer_to_the_last() -> None:
    graph = traced(Sharded(3), X)
    report = split(graph)[NAME]
    assert (report.matched, report.near_misses) == (3, ())
    # The first residual is cut where it stands; no sum is gathered.
    assert sorted(names(graph)) == sorted(["rms_norm", "local_shard", *LAYER * 3])
    shapes = {tuple(n.meta["example_value"].shape) for n in graph.module.graph.nodes if "getitem" in n.name}
    assert shapes == {(1, 3, SIZE)}


def test_it_runs_on_request_alone() -> None:
    report = rewritten(traced(Sharded(1), X))[NAME]
    assert (report.matched, report.skipped) == (0, SEQUENCE_PARALLEL.traits.on_request) and report.skipped


def test_norms_before_the_add_are_split_each_by_itself() -> None:
    graph = traced(PostNorm(2), X)
    assert split(graph)[NAME].matched == 2
    assert names(graph) == ["reduce_scatter", "rms_norm", "all_gather"] * 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("disable", [(), ("fuse_add_rms_norm_quantize",)], ids=["joined before", "two ops"])
def test_codes_are_gathered_where_the_norm_gives_them(disable: tuple[str, ...]) -> None:
    graph = traced(Ending(layers.codes_fp8), X)
    assert split(graph, disable=("async_tensor_parallel", *disable))[NAME].matched == 2
    joined = ["reduce_scatter", "add_rms_norm_quantize", "all_gather", "all_gather"]
    assert names(graph)[5:] == ([*LAYER, "quantize"] if disable else joined)


class Read(Sharded):
    """The sum of the first layer is read by another than the next norm."""

    def forward(self, x: Tensor) -> Any:
        first = x + self.reduce(self.layer(0, x))
        second = first + self.reduce(self.layer(1, self.norms[0](first)))
        return self.norms[1](second), first.cos()


def test_a_sum_that_is_read_whole_stays_whole_and_what_follows_is_split() -> None:
    graph = traced(Read(2), X)
    report = split(graph)[NAME]
    assert report.matched == 1 and "cos reads the whole sum" in reasons(report)
    assert names(graph).count("local_shard") == names(graph).count("all_reduce_add_rms_norm") == 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (SecondReader, "is read by cos, add_rms_norm"),
        (WriteBetween, "written in between by add_"),
        (Itself, "adds total to itself"),
    ],
)
def test_what_is_no_site_stays_with_the_reason(model: type[Sharded], reason: str) -> None:
    graph = traced(model(1), X)
    report = split(graph)[NAME]
    assert report.matched == 0 and reason in reasons(report), reasons(report)
    assert "reduce_scatter" not in names(graph)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("shape", "dim"), [((1, 6, SIZE), 1), ((4, 1, SIZE), 0), ((8, SIZE), 0), ((3, 2, SIZE), 1)])
def test_the_first_dimension_that_is_divided_is_cut(shape: tuple[int, ...], dim: int) -> None:
    graph = traced(Sharded(1), drawn(*shape))
    assert split(graph)[NAME].matched == 1
    (node,) = [node for node in graph.module.graph.nodes if "reduce_scatter" in str(node.target)]
    assert node.args[2] == dim


@pytest.mark.slow
def test_odd_numbers_of_tokens_stay_whole_and_are_fused_instead() -> None:
    graph = traced(Sharded(2), drawn(1, 5, SIZE))
    reports = split(graph)
    assert reports[NAME].matched == 0 and reports["fuse_all_reduce_norm"].matched == 2
    wanted = "2 processes do not divide the tokens of all_reduce_default, of shape (1, 5, 32)"
    assert reports[NAME].near_misses[0].reason == wanted


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("sizes", "matched", "reason"),
    [
        ((4, 8, 64), 2, ""),
        ((2,), 2, ""),
        ((4, 5), 0, "do not divide the tokens of all_reduce_default, of shape (1, 4, 32), (1, 5, 32)"),
        ((), 0, "asks about a symbolic size: whether 2 processes divide the tokens of shape"),
    ],
    ids=["all divided", "one token each", "one bucket is odd", "unknown"],
)
def test_open_numbers_of_tokens_are_those_of_the_buckets(sizes: tuple[int, ...], matched: int, reason: str) -> None:
    graph = traced(Sharded(2), X, dynamic={"x": [1]})
    ranges = dict(graph.shape_env.var_to_range)
    report = split(graph, sizes=sizes)[NAME]
    assert report.matched == matched and reason in reasons(report)
    assert graph.shape_env.var_to_range == ranges and not graph.shape_env.guards


def test_buckets_are_told_apart_by_their_bytes_and_by_whether_they_are_divided() -> None:
    limits = {"least_bytes_of_2": 8 * SIZE * 4}
    passes = [replace(each, params=limits) if each.name == NAME else each for each in COMMON_PASSES]
    graph = traced(Sharded(2, reduce=layers.canonical), X, dynamic={"x": [1]})
    sizes = [dict.fromkeys(graph.symbols, tokens) for tokens in (4, 8, 9, 16)]
    said = list(PassManager(passes, enable=(NAME,)).told_apart(graph.module, sizes))
    assert [len(sums) for (sums,) in said] == [0, 2, 0, 2] and said[1] == said[3]
    assert not list(PassManager(passes).told_apart(graph.module, sizes))


@pytest.mark.slow
def test_the_least_number_of_bytes_is_a_parameter() -> None:
    for least, matched in ((6 * SIZE * 4, 1), (6 * SIZE * 4 + 1, 0)):
        limits = {"least_bytes_of_2": least}
        passes = [replace(each, params=limits) if each.name == NAME else each for each in COMMON_PASSES]
        report = split(traced(Sharded(1), X), passes=passes)[NAME]
        assert report.matched == matched and report.uuid != SEQUENCE_PARALLEL.uuid()
        assert matched or f"the pass is for {least} at least" in reasons(report)


# --- async_tensor_parallel


def overlapped(model: Any, x: Tensor, **options: Any) -> Any:
    graph = traced(model, x, **options)
    return graph, rewritten(graph, enable=(NAME,), sizes=(4, 8) if options else ())["async_tensor_parallel"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"dynamic": {"x": [1]}}], ids=["fixed", "open"])
def test_products_go_with_the_collectives_next_to_them(options: Any) -> None:
    graph, report = overlapped(Sharded(3), X, **options)
    # Each sum is reduced behind a product; the last norm has none after it.
    assert report.matched == 5 and reasons(report) == "no linear layer reads all_gather_default_4"
    assert names(graph).count("linear_reduce_scatter") == 3 and names(graph).count("all_gather_linear") == 2
    assert names(graph).count("all_gather") == 1


ALL_OPS = frozenset(declared_ops())


@pytest.mark.slow
def test_a_gated_product_goes_with_the_gathering_and_leaves_its_gate() -> None:
    graph = traced(Gated(3), X)
    report = rewritten(graph, enable=(NAME,), implemented=ALL_OPS)["async_tensor_parallel"]
    assert report.matched == 5 and reasons(report) == "no linear layer reads all_gather_default_4"
    layer = ["all_gather_linear", "gated_activation_fused", "linear_reduce_scatter", "add_rms_norm"]
    assert [name for name in names(graph) if name in (*layer, "gated_linear")][-8:] == layer * 2
    gates = [n for n in graph.module.graph.nodes if "gated_activation_fused" in str(n.target)]
    assert len(gates) == 2 and all(n.kwargs["kind"] == "gelu" and not n.kwargs["gate_first"] for n in gates)


@pytest.mark.slow
def test_a_gated_product_stays_where_no_implementation_would_take_the_pair() -> None:
    for implemented in (None, ALL_OPS - {"core::all_gather_linear"}):
        graph = traced(Gated(3), X)
        report = rewritten(graph, enable=(NAME,), implemented=implemented)["async_tensor_parallel"]
        assert report.matched == 3 and "no linear layer reads all_gather_default" in reasons(report)
        assert names(graph).count("gated_linear") == 3 and "gated_activation_fused" not in names(graph)


class GatedAndRead(Gated):
    """A gated product of a gathered tensor that something else reads too."""

    def forward(self, x: Tensor) -> Any:
        whole = torch.ops.core.all_gather(x, "", 1)
        return self.gated(0, whole), whole.cos()


def test_others_read_what_was_gathered_beside_a_gated_product() -> None:
    graph = traced(GatedAndRead(1), X)
    report = rewritten(graph, implemented=ALL_OPS)["async_tensor_parallel"]
    assert report.matched == 1 and names(graph) == ["all_gather_linear", "gated_activation_fused"]
    (cos,) = [n for n in graph.module.graph.nodes if "cos" in n.name]
    assert cos.args[0].args[1] == 1 and "all_gather_linear" in str(cos.args[0].args[0].target)


class GatedByItself(Gated):
    def forward(self, x: Tensor) -> Any:
        whole = torch.ops.core.all_gather(x[0], "", 0)
        return torch.ops.core.gated_linear(whole, whole, None, kind="silu")


def test_a_gated_product_of_a_tensor_with_itself_is_none() -> None:
    report = rewritten(traced(GatedByItself(1), drawn(1, SIZE // 2, SIZE)), implemented=ALL_OPS)
    assert report["async_tensor_parallel"].matched == 0


class TwoReaders(Sharded):
    """Two products read one gathered tensor, and so does something else."""

    def forward(self, x: Tensor) -> Any:
        whole = torch.ops.core.all_gather(x, "", 1)
        return self.ups[0](whole), self.ups[1](whole), whole.cos()


def test_one_product_goes_with_the_gathering_and_others_read_its_result() -> None:
    graph, report = overlapped(TwoReaders(2), X)
    assert report.matched == 1 and names(graph) == ["all_gather_linear"]
    (node,) = [node for node in graph.module.graph.nodes if "all_gather_linear" in str(node.target)]
    gathered = next(user for user in node.users if user.args[1] == 1)
    assert len(gathered.users) == 2


class Other(Sharded):
    """A collective that is next to no product, in the way that the test says."""

    def __init__(self, how: str) -> None:
        super().__init__(1)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "no product":
            return torch.ops.core.reduce_scatter(x.sin(), "", 1)
        if self.how == "features":
            return self.downs[0](torch.ops.core.all_gather(x[..., :24], "", 2))
        product = self.ups[0](x)
        if self.how == "written":
            part = torch.ops.core.reduce_scatter(product, "", 1)
            return part, product.add_(1)
        return torch.ops.core.reduce_scatter(product, "", 1), product.cos()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no product", "is no linear layer's"),
        ("features", "along the features, not the tokens"),
        ("two readers", "is read by others too"),
        ("written", "is read by others too"),
    ],
)
def test_other_collectives_stay_with_the_reason(how: str, reason: str) -> None:
    _, report = overlapped(Other(how), X)
    assert report.matched == 0 and reason in reasons(report)
