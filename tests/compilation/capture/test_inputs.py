"""core/compilation/capture/inputs.py: declarations, buckets, and buffers that share storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.graphs.backend import GraphKey
from core.compilation.capture.buffers import StaticBuffers
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.errors import UsageError
from tests.support import refused

TOKENS = InputSpec(("tokens", 4), torch.float32)
STARTS = InputSpec(("seqs + 1",), torch.int32, padding="edge")
BOTH = {"x": TOKENS, "starts": STARTS}


def keys(*dims: tuple[int, ...], phase: str = "main") -> tuple[GraphKey, ...]:
    return tuple(GraphKey(phase, d) for d in dims)


@pytest.mark.parametrize("dim", ["", "2n", "n +", "n + m", "n - 1", "n * 2", " n"])
def test_a_malformed_dimension_is_refused(dim: str) -> None:
    with refused(UsageError, f"input dimension {dim!r}", "neither an int nor", "'seqs + 1'"):
        InputSpec((dim,), torch.float32)


def test_an_unknown_padding_is_refused() -> None:
    with refused(UsageError, "padding 'zeros'", "zero, sentinel, edge, keep, copy"):
        InputSpec(("n",), torch.float32, padding="zeros")  # type: ignore[arg-type]


def test_a_spec_resolves_its_shape() -> None:
    spec = InputSpec(("tokens", 3, "seqs + 1", "tokens"), torch.float32)
    assert spec.dims() == ("tokens", "seqs")
    assert spec.resolve({"tokens": 5, "seqs": 2}) == (5, 3, 3, 5)
    assert InputSpec(("n+12",), torch.float32).resolve({"n": 1}) == (13,)


def test_measuring_reads_the_sizes() -> None:
    sizes: dict[str, int] = {}
    STARTS.measure("starts", (4,), sizes)
    TOKENS.measure("x", (7, 4), sizes)
    assert sizes == {"seqs": 3, "tokens": 7}


@pytest.mark.parametrize(
    ("spec", "shape", "known"),
    [
        (TOKENS, (7,), {}),
        (TOKENS, (7, 4, 1), {}),
        (TOKENS, (7, 5), {}),
        (TOKENS, (7, 4), {"tokens": 6}),
        (InputSpec(("n", "n"), torch.float32), (2, 3), {}),
        (STARTS, (0,), {}),
    ],
    ids=["rank too low", "rank too high", "fixed size", "another input's size", "unequal sizes", "fewer than none"],
)
def test_a_shape_that_contradicts_is_refused(spec: InputSpec, shape: tuple[int, ...], known: dict[str, int]) -> None:
    with refused(UsageError, f"input 'x' of shape {shape}", f"declares {spec.shape}", "declared shapes"):
        spec.measure("x", shape, known)


def test_a_list_of_sizes_is_one_phase() -> None:
    table = BucketTable.build({"x": TOKENS}, [8, 2, 4])
    assert table.dims == ("tokens",)
    assert table.phases == {"main": keys((2,), (4,), (8,))}


def test_equal_buckets_are_one() -> None:
    assert BucketTable.build({"x": TOKENS}, [8, {"tokens": 8}, 8]).phases == {"main": keys((8,))}


def test_no_buckets_means_fixed_shapes() -> None:
    table = BucketTable.build({"x": InputSpec((3,), torch.float32)}, None)
    assert table.phases == {"main": keys(())}
    assert table.find("main", {}) == GraphKey("main", ())
    assert str(GraphKey("main", ())) == "main[]"


def test_phases_have_buckets_of_their_own() -> None:
    decode = [{"seqs": 2, "tokens": 2}]
    table = BucketTable.build(BOTH, {"decode": decode, "prefill": [{"tokens": 64, "seqs": 1}]})
    assert table.dims == ("tokens", "seqs")
    assert table.phases["prefill"] == keys((64, 1), phase="prefill")
    assert table.sizes(table.phases["prefill"][0]) == {"tokens": 64, "seqs": 1}


@pytest.mark.parametrize(
    "entry",
    [0, -1, 2.0, "8", True, {}, {"tokens": 8}, {"tokens": 8, "seqs": 2, "other": 1}, 8],
)
def test_a_bucket_that_does_not_fit_the_inputs_is_refused(entry: Any) -> None:
    with refused(UsageError, f"bucket {entry!r} of phase 'main'", "tokens, seqs", "{'tokens': 8, 'seqs': 8}"):
        BucketTable.build(BOTH, [entry])


@pytest.mark.parametrize("size", [0, -1, 2.0, "8", True])
def test_a_bucket_whose_size_is_none_is_refused(size: Any) -> None:
    with refused(UsageError, "of phase 'main'", "a whole number above 0", "{'tokens': 8, 'seqs': 8}"):
        BucketTable.build(BOTH, [{"tokens": size, "seqs": 1}])


@pytest.mark.parametrize("entry", [0, 2.5, "8", True, {"n": 8}])
def test_a_bad_size_of_a_single_dimension_is_refused(entry: Any) -> None:
    with refused(UsageError, f"bucket {entry!r} of phase 'main'", "tokens", "one positive size per dimension"):
        BucketTable.build({"x": TOKENS}, [entry])


def test_buckets_without_dimensions_are_refused_and_the_reverse() -> None:
    with refused(UsageError, "bucket 8", "bucket dimensions are: none", "leave `buckets` out"):
        BucketTable.build({"x": InputSpec((3,), torch.float32)}, [8])
    with refused(UsageError, "compiling without buckets", "dimensions tokens", "buckets=[{'tokens': 8}]"):
        BucketTable.build({"x": TOKENS}, None)


@pytest.mark.parametrize("buckets", [[], {"decode": []}, 8, {"decode": iter([8])}], ids=["[]", "phase", "int", "iter"])
def test_what_is_no_list_of_buckets_is_refused(buckets: Any) -> None:
    with refused(UsageError, "buckets", "not a list of at least one bucket", "{'decode': [8, 16]}"):
        BucketTable.build({"x": TOKENS}, buckets)


def test_no_phase_is_refused() -> None:
    with refused(UsageError, "empty mapping", "no phase", "at least one phase"):
        BucketTable.build({"x": TOKENS}, {})


def test_the_smallest_bucket_that_holds_all_sizes_is_found() -> None:
    entries = [{"tokens": t, "seqs": s} for t, s in ((4, 4), (16, 2), (8, 8))]
    table = BucketTable.build(BOTH, entries)
    assert table.phases["main"] == keys((4, 4), (16, 2), (8, 8))
    found = {
        (1, 1): (4, 4),
        (4, 4): (4, 4),
        (5, 2): (16, 2),
        (5, 3): (8, 8),
        (0, 0): (4, 4),
        (16, 3): None,
        (17, 1): None,
    }
    for (tokens, seqs), dims in found.items():
        key = table.find("main", {"tokens": tokens, "seqs": seqs})
        assert key == (GraphKey("main", dims) if dims else None), (tokens, seqs)


def test_buffers_share_one_storage_and_are_contiguous() -> None:
    entries = [{"tokens": t, "seqs": s} for t, s in ((4, 4), (16, 2))]
    table = BucketTable.build(BOTH, entries)
    buffers = StaticBuffers(BOTH, table, torch.device("cpu"))
    small, large = (buffers.views(key) for key in table.phases["main"])
    assert {name: tuple(t.shape) for name, t in small.items()} == {"x": (4, 4), "starts": (5,)}
    assert {name: tuple(t.shape) for name, t in large.items()} == {"x": (16, 4), "starts": (3,)}
    assert all(t.is_contiguous() for views in (small, large) for t in views.values())
    assert all(small[name].data_ptr() == large[name].data_ptr() for name in BOTH)
    assert buffers.num_bytes == 16 * 4 * 4 + 5 * 4


def test_addresses_and_first_content() -> None:
    specs = {
        padding: InputSpec(("n",), torch.int64, padding=padding, value=7 if padding == "sentinel" else 0)  # type: ignore[arg-type]
        for padding in ("zero", "sentinel", "edge", "keep", "copy")
    }
    table = BucketTable.build(specs, [3])
    buffers = StaticBuffers(specs, table, torch.device("cpu"))
    (key,) = table.phases["main"]
    first = {name: int(t.unique()) for name, t in buffers.views(key).items()}
    assert first == {"zero": 0, "sentinel": 7, "edge": 0, "keep": 0, "copy": 0}
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(*(buffers.views(key).values() for _ in "ab"), strict=True))
