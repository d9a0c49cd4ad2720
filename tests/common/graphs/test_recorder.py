"""The recorder keeps the rules of a hardware graph: no side effects, poisoned outputs, no host reads, exact replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from core.common.graphs.recorder import Recording
from core.common.graphs.tape import Tape
from core.errors import CaptureError

Outputs = tuple[torch.Tensor, ...]


def record(fn: Callable[[], Outputs]) -> tuple[Tape, Outputs]:
    """Record one run of `fn`."""
    recording = Recording()
    try:
        outputs = fn()
        return recording.finish(), outputs
    finally:
        recording.abandon()


@torch.library.custom_op("acme_test::append", mutates_args=("cache",))
def append(cache: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Write a row into the cache and return the sum of the cache: mutation and a fresh output in one opaque call."""
    cache[int(position)] = row
    return cache.sum(dim=0)


@torch.library.custom_op("acme_test::doubled_by_hand", mutates_args=())
def doubled_by_hand(x: torch.Tensor) -> torch.Tensor:
    """Double by way of the host, as a kernel that knows its device may."""
    return torch.tensor([2 * value for value in x.tolist()])


def test_replay_follows_changed_inputs_at_fixed_addresses() -> None:
    x = torch.randn(4, 3)
    weight = torch.nn.Parameter(torch.randn(3, 3))
    with torch.no_grad():
        tape, (out,) = record(lambda: (torch.relu(x @ weight) + 1,))
    address = out.data_ptr()
    for _ in range(3):
        x.copy_(torch.randn(4, 3))
        with torch.inference_mode():
            tape.replay()
        assert torch.equal(out, torch.relu(x @ weight) + 1)
        assert out.data_ptr() == address


@pytest.mark.parametrize(
    ("make", "is_poison"),
    [
        (lambda x: x * 2, lambda out: out.isnan().all()),
        (lambda x: (x * 2).to(torch.bfloat16), lambda out: out.isnan().all()),
        (lambda x: x.argmax(dim=-1), lambda out: (out == torch.iinfo(torch.int64).max).all()),
        (lambda x: x > 0, lambda out: torch.equal(out, torch.zeros(4, 3) == 1)),
        (lambda x: x.sum(dim=0).expand(5, 3), lambda out: out.isnan().all()),
        (lambda x: (x * 2).t()[::2], lambda out: out.isnan().all()),
    ],
    ids=["float", "bfloat16", "int", "bool", "expanded", "strided view"],
)
def test_outputs_hold_no_result_before_the_first_replay(
    make: Callable[[torch.Tensor], torch.Tensor], is_poison: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.ones(4, 3)
    tape, (out,) = record(lambda: (make(x),))
    assert is_poison(out)
    tape.replay()
    assert torch.equal(out, make(x))
    x.fill_(-2)
    tape.replay()
    assert torch.equal(out, make(x))


def _write_view(x: torch.Tensor) -> Outputs:
    x.view(2, 6)[1].add_(1)
    return (x,)


def _write_strided(x: torch.Tensor) -> Outputs:
    x.t()[::2].mul_(3)
    return (x.t(),)


def _write_out_argument(x: torch.Tensor) -> Outputs:
    torch.add(x, 1, out=x)
    return (x[1],)


def _write_scattered(x: torch.Tensor) -> Outputs:
    x.index_put_((torch.tensor([0, 2]),), torch.ones(2, 3), accumulate=True)
    return (x.sum(),)


def _write_foreach(x: torch.Tensor) -> Outputs:
    torch._foreach_add_([x[0], x[1]], 2.0)
    return (x, x)


@pytest.mark.parametrize("fn", [_write_view, _write_strided, _write_out_argument, _write_scattered, _write_foreach])
@pytest.mark.parametrize("inference", [False, True])
def test_writes_are_undone_at_capture_and_land_once_per_replay(fn: Callable[..., Outputs], inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.arange(12.0).reshape(4, 3)
        expected = x.clone()
        tape, outputs = record(lambda: fn(x))
    assert torch.equal(x, expected)
    for _ in range(3):
        with torch.inference_mode():
            tape.replay()
            wanted = fn(expected)
        assert torch.equal(x, expected)
        assert all(torch.equal(out, want) for out, want in zip(outputs, wanted, strict=True))


def test_outputs_that_are_inputs_or_views_of_them_alias_them() -> None:
    x = torch.arange(6.0)
    tape, (same, view) = record(lambda: (x, x.view(2, 3).t()))
    assert same is x
    assert view.data_ptr() == x.data_ptr()
    x.add_(1)
    tape.replay()
    assert torch.equal(view, x.view(2, 3).t())
    assert not tape.calls, "views need no replay"


def test_an_opaque_op_that_writes_a_cache_is_one_call() -> None:
    cache, row, position = torch.zeros(4, 2), torch.ones(2), torch.tensor(1)
    tape, (total,) = record(lambda: (append(cache, row, position),))
    assert torch.equal(cache, torch.zeros(4, 2))
    assert total.isnan().all()
    assert len(tape.calls) == 1
    position.fill_(3)
    tape.replay()
    row.fill_(5)
    position.fill_(0)
    tape.replay()
    assert torch.equal(cache[:, 0], torch.tensor([5.0, 0.0, 0.0, 1.0]))
    assert torch.equal(total, torch.tensor([6.0, 6.0]))


def test_an_opaque_op_may_read_its_arguments() -> None:
    x = torch.arange(3.0)
    tape, (out,) = record(lambda: (doubled_by_hand(x),))
    x.add_(1)
    tape.replay()
    assert torch.equal(out, x * 2)


def test_writes_to_intermediates_and_literals_start_afresh() -> None:
    x = torch.ones(3)

    def fn() -> Outputs:
        literal = torch.tensor([1.0, 2.0, 3.0])
        literal.add_(x)
        scratch = torch.zeros(3)
        scratch.add_(literal)
        return (scratch, literal)

    tape, outputs = record(fn)
    for _ in range(2):
        tape.replay()
        assert all(torch.equal(out, torch.tensor([2.0, 3.0, 4.0])) for out in outputs)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x.sum() > 0), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: torch.where(x > 0), "nonzero"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: torch.equal(x, x), "aten.equal"),
        (lambda x: x.long().unique(), "unique"),
        (lambda x: torch.repeat_interleave(x, x.long()), "repeat_interleave"),
    ],
)
def test_host_reads_are_refused(read: Callable[[torch.Tensor], object], named: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.ones(3)

        def fn() -> Outputs:
            x.add_(1)
            read(x)
            return (x,)

        with pytest.raises(CaptureError, match="depends on device data") as caught:
            record(fn)
        assert named in caught.value.asked
        assert torch.equal(x, torch.ones(3)), "a failed capture gives everything back"


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[torch.tensor([0, 2])],
        lambda x: torch.repeat_interleave(x, torch.tensor([1, 1, 1]), output_size=3),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.detach_(),
    ],
)
def test_harmless_relatives_of_refused_ops_are_recorded(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(3.0)
    tape, (out,) = record(lambda: (use(x),))
    tape.replay()
    assert torch.equal(out, use(x))


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (lambda x: x.unsqueeze_(0), "in place"),
        (lambda x: x.resize_(1), "in place"),
        (lambda x: x.to_sparse(), "depends on device data|only memory"),
    ],
)
def test_what_a_replay_cannot_repeat_is_refused(use: Callable[[torch.Tensor], torch.Tensor], found: str) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=found):
        record(lambda: (use(x),))
    assert x.shape == (3,)


def test_an_exception_in_the_callable_restores_writes_and_passes_through() -> None:
    x = torch.zeros(2)

    def fn() -> Outputs:
        x.add_(1)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        record(fn)
    assert torch.equal(x, torch.zeros(2))
    assert torch.equal(x + 1, torch.ones(2)), "eager work goes on as before"


def test_random_numbers_advance_at_replay_but_not_at_capture() -> None:
    torch.manual_seed(0)
    expected = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(0)
    tape, (out,) = record(lambda: (torch.rand(3),))
    for wanted in expected:
        tape.replay()
        assert torch.equal(out, wanted)


def test_empty_tensors_are_harmless() -> None:
    x = torch.empty(0, 3)
    tape, outputs = record(lambda: (x + 1, x.sum(dim=0)))
    tape.replay()
    assert outputs[0].shape == (0, 3)
    assert torch.equal(outputs[1], torch.zeros(3))


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty(3),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(3),
        lambda x: torch.empty_strided((3,), (2,)),
        lambda x: x.new_empty_strided((3,), (1,)),
        lambda x: torch.empty_permuted((3,), (0,)),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_an_allocation_is_not_replayed_but_its_memory_is_the_graphs(
    allocate: Callable[[torch.Tensor], torch.Tensor], inference: bool
) -> None:
    with torch.inference_mode(inference):
        x = torch.arange(3.0)

        def fn() -> Outputs:
            buffer = allocate(x)
            buffer[:2] = x[:2]
            untouched = allocate(x)
            return buffer, buffer + untouched

        tape, (buffer, total) = record(fn)
    assert not any("empty" in str(call.op) for call in tape.calls)
    assert buffer.isnan().all()
    address = buffer.data_ptr()
    for scale in (1.0, 5.0):
        with torch.inference_mode():
            x.fill_(scale)
            tape.replay()
        assert buffer[:2].tolist() == [scale, scale] and buffer.data_ptr() == address
        assert buffer[2].isnan() and total.isnan().all(), "what was never written stays unusable"


def test_an_empty_out_argument_may_grow() -> None:
    x = torch.ones(3)
    tape, (out, same) = record(lambda: (torch.add(x, 1, out=torch.empty(0)), torch.empty(0)))
    assert out.isnan().all(), "poisoned where it lies after growing"
    tape.replay()
    assert out.tolist() == [2, 2, 2] and same.shape == (0,)


@pytest.mark.parametrize("ours", [False, True])
def test_other_out_arguments_keep_their_size(ours: bool) -> None:
    x, foreign = torch.ones(3), torch.empty(0)
    with pytest.raises(CaptureError, match="it resizes its `out=` tensor"):
        record(lambda: (torch.add(x, 1, out=torch.zeros(0) if ours else foreign),))
    assert foreign.shape == (0,) and foreign.untyped_storage().nbytes() == 0


def test_two_storages_in_one_memory_are_both_restored() -> None:
    array = torch.zeros(2).numpy()
    one, two = torch.from_numpy(array), torch.from_numpy(array)
    tape, _ = record(lambda: (one.add_(1), two.add_(1)))
    assert one.tolist() == [0, 0]
    tape.replay()
    assert two.tolist() == [2, 2]


def test_memory_freed_while_recording_does_not_come_back_as_another_tensors() -> None:
    x, state = torch.ones(1000), torch.zeros(1000)

    def fn() -> Outputs:
        total = torch.zeros(1000)
        for n in range(50):
            torch.empty(1000)  # dropped at once, and on no tape
            scratch = x * n
            state.add_(scratch)
            total += scratch
        return (total,)

    tape, (total,) = record(fn)
    assert torch.equal(state, torch.zeros(1000)) and total.isnan().all()
    for count in (1, 2):
        tape.replay()
        assert torch.equal(total, torch.full((1000,), 1225.0))
        assert torch.equal(state, total * count)


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (torch.float64, float("nan")),
        (torch.float8_e4m3fn, float("nan")),
        (torch.float8_e5m2, float("nan")),
        (torch.float8_e8m0fnu, float("nan")),
        (torch.float8_e4m3fnuz, float("nan")),
        (torch.complex64, float("nan")),
        (torch.int8, 127),
        (torch.uint8, 255),
        (torch.uint16, 2**16 - 1),
    ],
)
def test_every_dtype_is_poisoned(dtype: torch.dtype, poison: float) -> None:
    x = torch.ones(4)
    tape, (out,) = record(lambda: (x.to(dtype),))
    values = out.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert values.isnan().all() if poison != poison else (values == poison).all()
    tape.replay()
    assert torch.equal(out.to(torch.float32) if not dtype.is_complex else out.real, x)
