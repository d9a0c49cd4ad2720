"""core_cpu/attention.py and csrc/: judged against the reference, over tiles, threads and instruction sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import core
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.declaration import CanonicalOp
from core_cpu.attention import IMPLEMENTATIONS, attention, why_not
from tests.attention_cases import CASES, NEW, Call, judged, steps
from tests.kernel_cases import CPU, DTYPES
from tests.support import compile_with

pytestmark = pytest.mark.usefixtures("kernels")

LONG = ((70, 700), (1, 1500), (130, 130))
"""More rows than a share has, more positions than a tile has."""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def run(**call: Any) -> torch.Tensor:
    """Run the kernel on a call from which `judged` has taken what others find out by themselves."""
    result: torch.Tensor = attention(**call)
    return result


def check(call: Call) -> torch.Tensor:
    return judged(ATTENTION, run, call, CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype) -> None:
    for sample in ATTENTION.samples(dtype, CPU):
        reason = why_not(ATTENTION.bind((), sample.kwargs))
        if sample.kwargs.get("mask") is not None:
            assert reason is not None and "mask" in reason
        elif "codes" in sample.name:
            assert reason is not None and "float8" in reason
        else:
            assert reason is None
            check(dict(sample.kwargs))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", CASES)
def test_cases_agree_with_the_reference(case: str) -> None:
    check(steps(**CASES[case]))


@pytest.mark.cases(3)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [{}, {"window": 150}, {"window": 150, "chunked": True}, {"sinks": torch.tensor([0.5, 4.0])}, {"causal": False}],
    ids=str,
)
def test_long_contexts_agree_with_the_reference(case: Call, dtype: torch.dtype) -> None:
    check(steps(LONG, sizes=(24, 40), page=16, dtype=dtype, **case))


@pytest.mark.cases(3)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("group", [1, 3, 8, 12])
def test_a_single_long_sequence_is_shared_out(group: int) -> None:
    for length in (1500, 1536, 1537):
        check(steps(((1, length),), sizes=(64, 64), page=16, heads=(group, 1), dtype=torch.bfloat16))


def test_results_do_not_change_from_run_to_run() -> None:
    torch.set_num_threads(2)
    call = steps(LONG, page=16, heads=(4, 2))
    first = run(**call)
    assert all(torch.equal(first, run(**call)) for _ in range(5))
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", NEW)
def test_layouts_of_query_key_and_value(name: str) -> None:
    call = steps(((20, 45), (30, 30)), heads=(2, 2))
    for other in (
        call[name].transpose(0, 1).contiguous().transpose(0, 1),  # heads before tokens
        call[name].transpose(1, 2).contiguous().transpose(1, 2),  # features apart
        torch.nn.functional.pad(call[name], (3, 0))[..., 3:],  # at no boundary of 16 bytes
    ):
        check({**call, name: other})


def test_caches_of_two_halves_of_one_tensor() -> None:
    call = steps(((20, 45), (30, 30)))
    both = torch.stack((call["key_cache"], call["value_cache"]), dim=2)  # (N, P, 2, K, D)
    call |= {"key_cache": both[:, :, 0], "value_cache": both[:, :, 1]}
    assert why_not(ATTENTION.bind((), call)) is None
    torch.testing.assert_close(run(**call), ATTENTION.reference(**call))


def test_no_tokens() -> None:
    assert run(**steps(((0, 0), (0, 0)))).shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_table": torch.tensor([[1, 99]], dtype=torch.int32)}, "names block 99 of 4"),
        ({"slot_mapping": torch.tensor([4, 5, 6, 7, 8, 9, 400])}, "slot 400 of 16"),
        ({"seq_lens": torch.tensor([13], dtype=torch.int32)}, "sequence 0 has 13 positions, of which 7 are new"),
        ({"seq_lens": torch.tensor([6], dtype=torch.int32)}, "sequence 0 has 6 positions, of which 7 are new"),
        ({"query_starts": torch.tensor([0, 8], dtype=torch.int32)}, "query_starts from 0 to 8 of 7 tokens"),
        ({"query_starts": torch.tensor([0], dtype=torch.int32)}, "1 query_starts for 1 sequences"),
    ],
)
def test_indices_beyond_what_there_is_are_refused(change: Call, said: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=said):
        run(**steps(((7, 7),)) | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: {"query": c["query"].double()}, "query is torch.float64"),
        (lambda c: {"key_cache": c["key_cache"].half()}, "key_cache is torch.float16"),
        (lambda c: {"value": c["value"].half()}, "value is torch.float16"),
        (lambda c: {"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks"),
        (lambda c: {"key_cache": c["key_cache"].transpose(2, 3)}, "key_cache has strides"),
    ],
)
def test_refuses_what_it_cannot_take(change: Any, named: str) -> None:
    call = steps(((7, 7),))
    assert why_not(ATTENTION.bind((), call)) is None
    reason = why_not(ATTENTION.bind((), call | change(call)))
    assert reason is not None and named in reason


class Attend(torch.nn.Module):
    """One call of the op over a cache of its own."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.places = {name: call[name] for name in ("block_table", "slot_mapping", "seq_lens", "query_starts")}
        self.caches = torch.nn.ParameterList(call[name] for name in ("key_cache", "value_cache"))
        self.scale = call["scale"]

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.core.attention(
            query * 2, key, value, *self.caches, *self.places.values(), scale=self.scale
        )
        return result + 1


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["inline", "inductor"])
def test_a_graph_calls_the_kernel_and_its_cache_is_written_in_place(lowering: str) -> None:
    call = steps(((20, 45), (30, 30)), heads=(4, 2))
    model = Attend({name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in call.items()}).eval()
    model.requires_grad_(False)
    shapes = {name: core.InputSpec(tuple(call[name].shape), torch.float32) for name in NEW}
    program = compile_with(model, core.select_device("cpu"), inputs=shapes, lowering=lowering)
    (choice,) = program.report().traces[0].ops
    assert choice.implementation == IMPLEMENTATIONS[0].name
    result = program(**{name: call[name] for name in NEW})
    expected = ATTENTION.reference(**call | {"query": call["query"] * 2}) + 1
    torch.testing.assert_close(result, expected)
    for cache, name in zip(model.caches, ("key_cache", "value_cache"), strict=True):
        torch.testing.assert_close(cache[1:], call[name][1:], equal_nan=True, rtol=0, atol=0)


MISTAKES = {
    "a window one position wider": ("position - call.window + 1", "position - call.window"),
    "chunks of another size": (
        "position / call.window * call.window",
        "position / (call.window + 1) * (call.window + 1)",
    ),
    "chunks taken for windows": (": call.chunked ", ": false "),
    "blocks in the order of the cache": ("table[position / cache.page]", "table[0] + position / cache.page"),
    "a share's largest score forgotten": ("shrunk(own.top, top)", "1.f"),
    "heads in turns": ("share_.head * call_.group + row % call_.group", "row % call_.group * 2 + share_.head"),
    "the last key left out": ("std::min(seen.stop - start, count)", "std::min(seen.stop - start, count) - 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(
    mistake: str, plant: Callable[[str, str, CanonicalOp], AbstractContextManager[Any]]
) -> None:
    with plant(*MISTAKES[mistake], ATTENTION) as wrong:
        torch.set_num_threads(2)
        try:
            for case in (
                CASES["window over tiles"],
                CASES["chunks over tiles"],
                {"lens": ((1, 1500), (9, 9)), "page": 16, "heads": (4, 2)},
            ):
                judged(ATTENTION, lambda **call: wrong.attention(**call), steps(**case), CPU)
        except AssertionError:
            return
        finally:
            torch.set_num_threads(1)
    pytest.fail("every case passed")
