"""core/common/graphs/weak.py: stand-ins that own nothing, except where somebody else does."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from core.common.graphs import weak
from core.common.graphs.weak import addresses, release, weak_by, weak_tensor

CPU = torch.device("cpu")


def expired(tensor_reference: StorageWeakRef) -> bool:
    gc.collect()
    return bool(tensor_reference.expired())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).view(3, 4),
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(12.0).view(3, 4)[1:, ::2],
        lambda: torch.arange(4.0)[1],
        lambda: torch.arange(4, dtype=torch.int8),
        lambda: torch.arange(3).bfloat16().expand(2, 3),
        lambda: torch.empty(0, 5),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_a_weak_tensor_is_the_same_memory_seen_the_same_way(make: object) -> None:
    tensor: Tensor = make()  # type: ignore[operator]
    weak = weak_tensor(tensor)
    assert (weak.dtype, weak.shape, weak.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert weak.storage_offset() == tensor.storage_offset() and weak.data_ptr() == tensor.data_ptr()
    assert torch.equal(weak, tensor) and not weak.requires_grad
    with torch.no_grad():
        if tensor.numel() and 0 not in tensor.stride():
            tensor.add_(1)
    assert torch.equal(weak, tensor)


def test_a_weak_tensor_keeps_nothing_alive() -> None:
    tensor = torch.ones(4)
    reference = StorageWeakRef(tensor.untyped_storage())
    weak = weak_tensor(tensor)
    del tensor
    assert expired(reference) and weak.shape == (4,)


def test_a_device_may_make_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weak, "_MAKERS", {})
    made: list[Tensor] = []

    def make(tensor: Tensor) -> Tensor:
        made.append(torch.full_like(tensor, 7))
        return made[-1]

    weak_by(torch.device("meta"), make)
    assert weak_tensor(torch.ones(2)).tolist() == [1, 1] and not made
    weak_by(torch.device("cpu"), make)
    assert weak_tensor(torch.ones(2)) is made[0]
    (out,) = release([torch.ones(3)], torch.device("cpu"))
    assert out is made[1]


def test_release_lets_go_of_what_nobody_else_holds() -> None:
    owned, loose = torch.ones(4), torch.ones(8)
    references = [StorageWeakRef(t.untyped_storage()) for t in (owned, loose)]
    address = loose.data_ptr()
    tensors = [owned, loose, loose[2:].view(2, 3)]
    del loose
    first, second, view = release(tensors, CPU)
    assert tensors == []
    assert [expired(each) for each in references] == [False, True]
    assert (second.data_ptr(), view.data_ptr(), view.shape) == (address, address + 8, (2, 3))
    del owned
    assert not expired(references[0]) and torch.equal(first, torch.ones(4)), "the stand-in has to hold owned memory"


def test_an_owner_of_a_view_is_an_owner() -> None:
    base = torch.arange(8.0)
    tensors = [base]
    view = base[4:]
    reference = StorageWeakRef(base.untyped_storage())
    del base
    (held,) = release(tensors, CPU)
    del view
    assert not expired(reference) and held.tolist() == list(range(8))


def test_tensors_that_memory_alone_does_not_tell_are_kept() -> None:
    class Tagged(Tensor):
        pass

    tensors = [torch.ones(2, dtype=torch.complex64).mul(1j).conj(), torch.ones(2).as_subclass(Tagged)]
    references = [StorageWeakRef(t.untyped_storage()) for t in tensors]
    conjugated, tagged = release(tensors, CPU)
    assert not any(expired(each) for each in references)
    assert conjugated.is_conj() and conjugated[0] == -1j and type(tagged) is Tagged


def test_tensors_of_another_device_are_kept() -> None:
    """A number on the host lies in no graph's pool: a weak stand-in of it would read freed memory."""
    tensors = [torch.tensor(3.0)]
    reference = StorageWeakRef(tensors[0].untyped_storage())
    (number,) = release(tensors, torch.device("meta"))
    assert not expired(reference) and number == 3


def test_memory_without_bytes_is_no_matter() -> None:
    (empty,) = release([torch.empty(0, 3)], CPU)
    assert empty.shape == (0, 3) and release([], CPU) == []


def test_a_stand_in_made_for_inference_tensors_can_be_written() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(2)]
    keep = tensors[0]
    (stand_in,) = release(tensors, CPU)
    stand_in.copy_(torch.ones(2))
    assert keep.tolist() == [1, 1]


def test_addresses_are_those_of_storages() -> None:
    base = torch.arange(4.0)
    assert addresses([base[1:], base.view(2, 2)]) == {base.data_ptr()} and addresses([]) == frozenset()
