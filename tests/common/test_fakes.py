"""core/common/fakes.py: shape rules, and when a declared fake is registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from core.common.fakes import FakeOp, FakeResult, apply_fakes, half_last, has_fake, like, nothing
from core.errors import PluginError
from tests.support import refused


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    """A foreign op library without fake kernels, but for `ready`, which has one, and `composite`, which needs none."""
    lib = torch.library.Library("fakes_test", "DEF")
    for name in ("gate", "copy_of", "late"):
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, lambda x: x.clone(), "CPU")
    lib.define("fill(Tensor(a!) x) -> ()")
    lib.impl("fill", lambda x: x.fill_(1) and None, "CPU")
    lib.define("ready(Tensor x) -> Tensor")
    torch.library.register_fake("fakes_test::ready", lambda x: x.new_empty(3), lib=lib)
    lib.define("composite(Tensor x) -> Tensor")
    lib.impl("composite", lambda x: x + 1, "CompositeExplicitAutograd")
    yield lib
    lib._destroy()


def apply(fake: FakeOp) -> FakeResult:
    ((declared, result),) = apply_fakes([fake])
    assert declared is fake
    return result


def faked(op: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with FakeTensorMode():
        return getattr(torch.ops.fakes_test, op)(torch.empty(*shape, dtype=dtype))


def test_a_missing_fake_is_registered_and_works() -> None:
    assert not has_fake("fakes_test::gate")
    with pytest.raises(UnsupportedOperatorException, match="gate"):
        faked("gate", 5, 8)
    assert apply(FakeOp(op="fakes_test::gate", rule=half_last())) == FakeResult(applied=True, reason="registered")
    assert has_fake("fakes_test::gate")
    out = faked("gate", 5, 8)
    assert (tuple(out.shape), out.dtype) == ((5, 4), torch.bfloat16)


def test_a_second_registration_is_no_error() -> None:
    results = [apply(FakeOp(op="fakes_test::copy_of", rule=like())) for _ in range(2)]
    assert [r.applied for r in results] == [True, True]
    assert results[1].reason == "registered earlier in this process"
    assert tuple(faked("copy_of", 2, 3).shape) == (2, 3)


def test_a_rule_for_an_op_that_only_writes() -> None:
    assert apply(FakeOp(op="fakes_test::fill", rule=nothing)).applied
    assert faked("fill", 2) is None


@pytest.mark.parametrize("op", ["fakes_test::ready", "fakes_test::composite", "aten::add.Tensor"])
def test_an_op_with_a_fake_of_its_own_keeps_it(op: str) -> None:
    assert has_fake(op)
    if not op.startswith("aten"):
        result = apply(FakeOp(op=op, rule=like()))
        assert not result.applied
        assert f"{op} brings a fake kernel of its own" in result.reason
    if op == "fakes_test::ready":
        assert tuple(faked("ready", 7).shape) == (3,)


@pytest.mark.parametrize("op", ["fakes_test::absent", "fakes_nowhere::f"])
def test_an_op_that_is_not_installed_is_skipped_with_a_reason(op: str) -> None:
    assert apply(FakeOp(op=op, rule=like())) == FakeResult(applied=False, reason=f"op {op} is not installed here")


@pytest.mark.parametrize("op", ["gate", "::gate", "fakes_test::", ""])
def test_an_unqualified_name_is_refused(op: str) -> None:
    with refused(PluginError, repr(op), "not a qualified op name", "'library::op'"):
        apply(FakeOp(op=op, rule=like()))


def test_rules_choose_their_argument() -> None:
    first, second = torch.empty(2, 4), torch.empty(3, 6, dtype=torch.float16)
    assert like(1)(first, second, extra=1).shape == second.shape
    assert half_last(1)(first, second).shape == (3, 3)
    assert half_last(1)(first, second).dtype == torch.float16
    assert like()(first.t(), second).stride() == (1, 4)
    assert nothing(first, key=second) is None
