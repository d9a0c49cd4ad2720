"""Host memory laid out like the static buffers, and the one copy that moves a step's inputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import core
from core.common.graphs.backend import GraphKey
from core.compilation.capture.buffers import StaticBuffers
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.program import Program
from core.errors import CaptureError, UsageError
from tests.recording import acme

INPUTS = {
    "ids": InputSpec(("tokens",), torch.int64),
    "table": InputSpec(("seqs", 5), torch.int32),
    "flags": InputSpec(("tokens",), torch.bool),
    "starts": InputSpec(("seqs + 1",), torch.int32, padding="edge"),
    "x": InputSpec(("tokens", 3), torch.bfloat16, padding="sentinel", value=2.5),
}
BUCKETS = [{"tokens": 4, "seqs": 2}, {"tokens": 9, "seqs": 3}]


class Model(nn.Module):
    """Reads every input, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, ids: Tensor, table: Tensor, flags: Tensor, starts: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.weight) * ids[:, None] + flags[:, None], table * 2 + starts[1:, None]


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return core.compile(Model(), acme(), inputs=INPUTS, buckets=BUCKETS, mode="full")


def draw(tokens: int, seqs: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 99, (tokens,), generator=random),
        "table": torch.randint(0, 99, (seqs, 5), generator=random, dtype=torch.int32),
        "flags": torch.rand(tokens, generator=random) > 0.5,
        "starts": torch.arange(seqs + 1, dtype=torch.int32),
        "x": torch.randn(tokens, 3, generator=random).to(torch.bfloat16),
    }


def copied(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [output.clone() for output in outputs]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mirrors", [1, 2, 3])
def test_staged_inputs_give_what_a_call_gives(program: Program, mirrors: int) -> None:
    staging = program.staging(mirrors=mirrors)
    for seed, (tokens, seqs) in enumerate([(4, 2), (9, 3), (4, 2), (4, 2), (9, 3)]):
        inputs = draw(tokens, seqs, seed)
        key = program.bucket("main", {"tokens": tokens, "seqs": seqs})
        assert key is not None
        for name, host in staging.inputs(key).items():
            assert host.device.type == "cpu"
            host.copy_(inputs[name])
        found = copied(staging.replay(key))
        assert same(found, copied(program(**inputs)))


def test_what_is_fed_takes_the_place_of_the_mirrors(program: Program) -> None:
    staging = program.staging()
    inputs, other = draw(4, 2, 1), draw(4, 2, 2)
    key = program.bucket("main", {"tokens": 4, "seqs": 2})
    assert key is not None
    for name, host in staging.inputs(key).items():
        host.copy_(inputs[name])
    found = copied(staging.replay(key, feed={"ids": other["ids"][:3]}))
    fed = {**inputs, "ids": torch.cat([other["ids"][:3], inputs["ids"][3:]])}
    assert same(found, copied(program(**fed))) and not same(found, copied(program(**inputs)))


def test_kept_inputs_need_no_copy_where_they_lie_last(program: Program) -> None:
    table = BucketTable.build(INPUTS, BUCKETS)
    buffers = StaticBuffers(INPUTS, table, torch.device("cpu"))
    small, large = table.phases["main"]
    assert buffers.span(large).stop > buffers.span(small).stop > 0
    assert buffers.span(large, without=["ids"]).stop < buffers.span(large).stop  # 72 bytes: the largest
    assert buffers.span(large, without=["starts"]) == buffers.span(large)
    assert buffers.span(large, without=list(INPUTS)) == slice(0, 0)

    staging = program.staging()
    inputs, other = draw(9, 3, 3), draw(9, 3, 4)
    for given in (inputs, other):
        for name, host in staging.inputs(large).items():
            host.copy_(given[name])
        kept = () if given is inputs else ("ids",)
        found = copied(staging.replay(large, kept=kept))
    assert same(found, copied(program(**{**other, "ids": inputs["ids"]})))


def test_buffers_do_not_overlap_and_are_aligned() -> None:
    table = BucketTable.build(INPUTS, BUCKETS)
    buffers = StaticBuffers(INPUTS, table, torch.device("cpu"))
    key = table.phases["main"][-1]
    views = buffers.views(key)
    assert list(views) == list(INPUTS) and views["x"].unique().tolist() == [2.5]
    start = buffers.memory.data_ptr()
    spans = sorted((view.data_ptr() - start, view.nbytes) for view in views.values())
    assert all(offset % 256 == 0 for offset, _ in spans)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= buffers.memory.numel()


def test_a_phase_with_long_inputs_makes_the_copies_of_another_no_longer() -> None:
    short, long = [{"tokens": 4, "seqs": 4}, {"tokens": 8, "seqs": 8}], [{"tokens": 5000, "seqs": 8}]
    inputs = {**INPUTS, "table": InputSpec(("seqs", 100), torch.int32)}
    table = BucketTable.build(inputs, {"prefill": long, "decode": short})
    buffers = StaticBuffers(inputs, table, torch.device("cpu"))
    alone = StaticBuffers(inputs, BucketTable.build(inputs, {"decode": short}), torch.device("cpu"))

    def length(given: StaticBuffers, size: int, without: tuple[str, ...] = ()) -> int:
        span = given.span(GraphKey("decode", (size, size)), without)
        return int(span.stop - span.start)

    for size in (4, 8):
        assert length(buffers, size) == length(alone, size)
        # The block table, the longest input of decode, lies last though it is not the longest of prefill.
        assert length(buffers, size, ("table",)) <= 4 * 256 < length(buffers, size)
    decode, prefill = (buffers.span(table.phases[phase][-1]) for phase in ("decode", "prefill"))
    assert decode.start >= prefill.stop or prefill.start >= decode.stop
    assert buffers.num_bytes == alone.num_bytes + sum(
        view.nbytes for view in buffers.views(table.phases["prefill"][0]).values()
    )
    assert all(buffers.views(keys[-1])["x"].unique().tolist() == [2.5] for keys in table.phases.values())


def test_the_first_content_of_a_mirror_is_the_buffers(program: Program) -> None:
    staging = program.staging()
    host = staging.inputs(program.keys[0])
    assert host["x"].unique().tolist() == [2.5] and not host["ids"].any()


def test_buckets_are_found_by_size(program: Program) -> None:
    large = program.bucket("main", {"tokens": 5, "seqs": 1})
    assert large is not None and large.dims == (9, 3)
    assert program.bucket("main", {"tokens": 10, "seqs": 1}) is None
    with pytest.raises(UsageError, match="phase 'decode'"):
        program.bucket("decode", {"tokens": 4, "seqs": 2})


@pytest.mark.parametrize("mirrors", [0, -1, True, "two"])
def test_a_number_of_mirrors_is_positive(program: Program, mirrors: int) -> None:
    with pytest.raises(UsageError, match="no number of mirrors"):
        program.staging(mirrors=mirrors)


def test_there_is_nothing_to_stage_without_captures() -> None:
    program = core.compile(Model(), acme(), inputs=INPUTS, buckets=BUCKETS, mode="off")
    with pytest.raises(CaptureError, match="no phase of it is captured"):
        program.staging()
    assert program.bucket("main", {"tokens": 4, "seqs": 2}) is None
    program.close()
    with pytest.raises(CaptureError, match="closed"):
        program.staging()
