"""core/common/ops/declaration.py: one declaration registers op, fake and metadata."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.declaration import CanonicalOp, declare, declared_ops, find_op
from core.errors import UsageError
from tests.support import refused

_NUMBERS = itertools.count()


def shift(x: Tensor, out: Tensor, *, by: float = 1.0, twice: bool = False) -> Tensor:
    out.copy_(x)
    return x + by * (2 if twice else 1)


@pytest.fixture
def op() -> CanonicalOp:
    """A freshly declared op; torch keeps it for the process, so each test gets a name of its own."""
    name = f"test_shift_{next(_NUMBERS)}"
    return declare(
        CanonicalOp(
            schema=f"{name}(Tensor x, Tensor(a!) out, *, float by=1.0, bool twice=False) -> Tensor",
            reference=shift,
            fake=lambda x, out, **_: torch.empty_like(x),
            calls=lambda draw: {},
        )
    )


def test_the_reference_is_the_kernel(op: CanonicalOp) -> None:
    x, out = torch.linspace(0, 1, 4), torch.zeros(4)
    assert torch.equal(op.overload(x, out, by=0.5), x + 0.5)
    assert torch.equal(out, x)


def test_the_fake_serves_fake_tensors(op: CanonicalOp) -> None:
    with FakeTensorMode():
        fake = op.overload(torch.empty(3, 2), torch.empty(3, 2))
    assert tuple(fake.shape) == (3, 2)


def test_the_schema_says_what_is_mutated(op: CanonicalOp) -> None:
    assert op.mutates == ("out",)
    assert ATTENTION.mutates == ("key_cache", "value_cache")


def test_bind_names_every_argument(op: CanonicalOp) -> None:
    call = op.bind(("x", "out"), {"twice": True})
    assert call.op == op.qualified_name
    assert dict(call.args) == {"x": "x", "out": "out", "by": 1.0, "twice": True}
    assert op.bind((), {"x": 1, "out": 2}).args == {"x": 1, "out": 2, "by": 1.0, "twice": False}
    with pytest.raises(TypeError):
        call.args["by"] = 2.0  # type: ignore[index]


def test_attention_defaults_are_bound() -> None:
    call = ATTENTION.bind(tuple("abcdefghi"), {"scale": 0.5})
    assert call.args["key_cache"] == "d" and call.args["query_starts"] == "i"
    defaults: dict[str, Any] = {"window": 0, "softcap": 0.0, "sinks": None, "mask": None, "causal": True}
    assert {k: call.args[k] for k in defaults} == defaults


def test_a_call_is_checked_and_reaches_each_function_as_the_schema_has_it() -> None:
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def seer(name: str) -> Callable[..., Any]:
        def see(*args: Any, **options: Any) -> Any:
            seen.append((name, args, options))
            return args[0]

        return see

    name = f"test_seen_{next(_NUMBERS)}"
    op = declare(
        CanonicalOp(
            schema=f"{name}(Tensor x, Tensor? y, *, float by=1.0) -> Tensor",
            reference=seer("reference"),
            eager=seer("eager"),
            fake=seer("fake"),
            check=seer("check"),
            calls=lambda draw: {},
        )
    )
    x, y = torch.zeros(2), torch.ones(2)
    assert op.eager is not None
    for called, function in (("reference", op.reference), ("eager", op.eager), ("fake", op.fake)):
        for args, options in (((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})):
            seen.clear()
            function(*args, **options, by=2.0)
            assert seen == [("check", (x, y), {"by": 2.0}), (called, (x, y), {"by": 2.0})]


def test_what_the_check_refuses_reaches_nothing() -> None:
    def refuse(x: Tensor) -> None:
        raise RuntimeError("not this one")

    def unreached(x: Tensor) -> Tensor:
        raise AssertionError("the check came too late")

    schema = f"test_refused_{next(_NUMBERS)}(Tensor x) -> Tensor"
    op = declare(CanonicalOp(schema=schema, reference=unreached, fake=unreached, check=refuse, calls=lambda draw: {}))
    for function in (op.reference, op.fake, op.overload):
        with pytest.raises(RuntimeError, match="not this one"):
            function(torch.zeros(2))


def test_a_name_is_declared_once(op: CanonicalOp) -> None:
    with refused(UsageError, repr(op.qualified_name), "declared already", "another name"):
        declare(op)


def test_declared_ops_are_found_by_overload_and_packet(op: CanonicalOp) -> None:
    assert find_op(op.overload) is op
    assert find_op(getattr(torch.ops.core, op.name)) is op
    assert declared_ops()[op.qualified_name] is op
    assert declared_ops()["core::attention"] is ATTENTION
    for other in (torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.add, shift, "core::attention"):
        assert find_op(other) is None


def test_the_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        declared_ops()["core::other"] = ATTENTION  # type: ignore[index]


def test_attention_may_be_cut_at() -> None:
    assert ATTENTION.break_point


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_are_deterministic_and_never_constant(dtype: torch.dtype) -> None:
    first, second = (list(ATTENTION.samples(dtype, torch.device("cpu"))) for _ in range(2))
    assert len({sample.name for sample in first}) == len(first) > 10
    required = {a.name for a in ATTENTION.overload._schema.arguments if not a.has_default_value()}
    for one, two in zip(first, second, strict=True):
        assert required <= one.kwargs.keys()
        for name, value in one.kwargs.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, two.kwargs[name]), (one.name, name)
                if name.endswith("_scale"):
                    assert value.dtype == torch.float32
                elif value.is_floating_point():
                    codes = name.endswith("_cache") and value.dtype == torch.float8_e4m3fn
                    assert value.float().unique().numel() > 1 and (codes or value.dtype == dtype), (one.name, name)
