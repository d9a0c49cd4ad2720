"""What a recorder repeats though no schema shows it: effects, collectives; and the random state that it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from core.common.graphs.recorder import Recording
from core.errors import CaptureError
from tests.common.graphs.test_recorder import Outputs, record

_SEEN: list[str] = []


@torch.library.custom_op("recorder_test::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    """Note the call: an effect that the schema does not show."""
    _SEEN.append("note")


_EFFECTS = torch.library.Library("recorder_test", "FRAGMENT")
_EFFECTS.define("wait(Tensor x) -> Tensor")


def _wait(x: torch.Tensor) -> torch.Tensor:
    _SEEN.append("wait")
    return x


_EFFECTS.impl("wait", _wait, "CPU")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_that_neither_writes_nor_allocates_is_repeated_unless_it_makes_a_view(
    mode: Callable[[], torch.no_grad],
) -> None:
    x = torch.ones(4)
    with mode():
        tape, (out,) = record(lambda: (note(x), torch.ops.recorder_test.wait(x.view(2, 2)).t() + 1)[1:])  # type: ignore[func-returns-value]
        _SEEN.clear()
        x.fill_(2)
        tape.replay()
    assert _SEEN == ["note", "wait"] and torch.equal(out, torch.full((2, 2), 3.0))


@pytest.fixture
def alone() -> Iterator[None]:
    """Be a process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_handle_to_work_under_way_is_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=r"allreduce_[\s\S]*handle to work under way[\s\S]*_functional_collectives"):
        record(lambda: (torch.distributed.all_reduce(x), x)[1:])  # type: ignore[no-untyped-call]
    assert torch.equal(x, torch.ones(2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_collective_and_its_wait_are_repeated(in_place: bool) -> None:
    x = torch.ones(2)
    ops = torch.ops._c10d_functional
    name = torch.distributed.distributed_c10d._get_default_group().group_name

    def step() -> Outputs:
        reduce = ops.all_reduce_ if in_place else ops.all_reduce
        return (ops.wait_tensor(reduce(x * 3, "sum", name)) + 1,)

    tape, (out,) = record(step)
    called = [str(call.op) for call in tape.calls]
    assert any("all_reduce" in op for op in called) and any("wait_tensor" in op for op in called)
    x.fill_(2)
    tape.replay()
    assert torch.equal(out, torch.full((2,), 7.0))


def test_the_random_state_of_the_device_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        state = torch.tensor([7])

        @classmethod
        def get_rng_state(cls, device: torch.device) -> torch.Tensor:
            return cls.state

        @classmethod
        def set_rng_state(cls, state: torch.Tensor, device: torch.device) -> None:
            cls.state = state

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    recording = Recording(torch.device("meta"))
    Module.state = torch.tensor([8])
    recording.finish()
    assert Module.state.item() == 7
