"""core/common/passes/packing.py: weights laid end to end, once, and only where nobody is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from core.common.passes.packing import Owners, Packing


def rows(count: int, width: int = 3) -> Tensor:
    return torch.arange(float(count * width)).view(count, width) + count


def packing(*parts: Tensor | None) -> Packing:
    return Packing(parts, tuple(2 if part is None else len(part) for part in parts))


def owners(*parts: Tensor | None) -> Owners:
    return Owners([part for part in parts if part is not None])


def test_parts_become_views_of_the_whole() -> None:
    a, b = nn.Parameter(rows(2), requires_grad=False), rows(4)
    values, old = [a.clone(), b.clone()], a.data_ptr()
    packed = packing(a, b)
    assert packed.packed() is None and owners(a, b).refusal(packed) == ""
    whole = packed.pack()
    assert torch.equal(whole, torch.cat(values)) and whole.is_contiguous()
    assert torch.equal(a, values[0]) and torch.equal(b, values[1])
    assert type(a) is nn.Parameter and a.is_leaf and a.data_ptr() != old
    whole[1].zero_()
    b.fill_(7.0)
    assert not a[1].any() and float(whole[2:].min()) == 7.0


def test_packing_again_gives_the_same_memory() -> None:
    a, b, c = rows(2), rows(4), rows(1)
    whole = packing(a, b, c).pack()
    again = packing(a, b, c)
    assert owners(a, b, c).refusal(again) == "" and again.pack().data_ptr() == whole.data_ptr()
    # So do neighbours among them.
    assert packing(b, c).pack().data_ptr() == b.data_ptr()


def test_other_orders_are_not_the_same_memory() -> None:
    a, b, c = rows(2), rows(2), rows(2)
    packing(a, b, c).pack()
    for parts in ((b, a), (a, c), (c, b, a)):
        assert packing(*parts).packed() is None
        assert "part of a larger tensor" in owners(*parts).refusal(packing(*parts))


def test_missing_parts_are_zeros() -> None:
    a, b = torch.ones(2), torch.ones(4)
    whole = packing(None, a, None, b).pack()
    assert whole.tolist() == [0.0] * 2 + [1.0] * 2 + [0.0] * 2 + [1.0] * 4
    assert packing(None, a, None, b).pack().data_ptr() == whole.data_ptr()
    # Memory that holds something else there does not stand for zeros.
    whole[5] = 3.0
    assert packing(None, a, None, b).packed() is None
    assert packing(None, None, a, None, b).packed() is None  # begins before the memory does
    assert packing(b, None).packed() is None  # ends behind it


def grad() -> Tensor:
    return nn.Parameter(rows(2))


def computed() -> Tensor:
    return nn.Parameter(rows(2)) * 2


REFUSED = {
    "transposed": (rows(3).t(), "not contiguous"),
    "sparse": (rows(2).to_sparse(), "layout"),
    "gradients": (grad(), "requires a gradient"),
    "another dtype": (rows(2).double(), "differ in dtype"),
    "another row": (rows(2, 4), "differ in dtype, device or row"),
    "a slice": (rows(9)[2:4], "part of a larger tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_moved_is_refused(case: str) -> None:
    part, reason = REFUSED[case]
    others = (part, rows(2).to(part.dtype) if case == "sparse" else rows(2))
    assert reason in owners(*others).refusal(packing(*others))


def test_a_computed_weight_is_refused_where_gradients_are_off() -> None:
    part = computed()
    with torch.no_grad():
        assert "no leaf" in owners(part, rows(2)).refusal(packing(part, rows(2)))


def test_memory_that_others_look_at_is_refused() -> None:
    a, b = rows(2), rows(4)
    view = a.view(-1)
    assert "shares its memory" in owners(a, b).refusal(packing(a, b))
    del view
    assert owners(a, b).refusal(packing(a, b)) == ""
