"""core/common/fakes/registering.py: when a declared fake is registered, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

import core
from core.common.fakes import (
    FakeOp,
    FakeResult,
    apply_fakes,
    apply_late,
    arg,
    argument,
    half_last,
    has_fake,
    like,
    new,
    nothing,
    results,
    size,
)
from core.errors import PluginError, TraceError
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
    lib.define("first(Tensor(a!) x, Tensor(b!) y, Tensor z, float eps=0.5) -> Tensor(a!)")
    lib.impl("first", lambda x, y, z, eps=0.5: y.copy_(z) and x.add_(eps), "CPU")
    lib.define("halves(Tensor x, int n=2) -> (Tensor, Tensor)")
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


@pytest.mark.slow
def test_a_library_that_is_loaded_later_gets_its_fakes_at_the_next_compile(library: torch.library.Library) -> None:
    fake = FakeOp(op="fakes_test::later", rule=like("x"))
    declared = apply_fakes([fake])
    assert not declared[0][1].applied and apply_late(declared) == ()
    library.define("later(Tensor x) -> Tensor")
    library.impl("later", lambda x: x.clone(), "CPU")
    device = core.select_device("cpu")
    program = core.compile(
        lambda x: torch.ops.fakes_test.later(x) + 1,
        replace(device, fakes=declared),
        inputs={"x": core.InputSpec((4,), torch.float32)},
        mode="compile",
    )
    assert has_fake(fake.op) and apply_late(declared) == ()
    assert torch.equal(program(x=torch.ones(4)), torch.full((4,), 2.0))


def test_an_op_without_a_fake_is_named_where_a_trace_meets_it(library: torch.library.Library) -> None:
    library.define("unfaked(Tensor x) -> Tensor")
    library.impl("unfaked", lambda x: x.clone(), "CPU")
    with refused(TraceError, "the op fakes_test::unfaked has no fake kernel", "test_registering.py", "docs/fakes.md"):
        core.compile(
            lambda x: torch.ops.fakes_test.unfaked(x) + 1,
            "cpu",
            inputs={"x": core.InputSpec((4,), torch.float32)},
            strict=True,
        )


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
    assert apply(FakeOp(op=op, rule=like())) == FakeResult(
        applied=False, reason=f"op {op} is not loaded in this process"
    )


@pytest.mark.parametrize("op", ["gate", "::gate", "fakes_test::", ""])
def test_an_unqualified_name_is_refused(op: str) -> None:
    with refused(PluginError, repr(op), "not a qualified op name", "'library::op'"):
        apply(FakeOp(op=op, rule=like()))


def test_a_fake_says_what_it_does() -> None:
    assert str(FakeOp(op="a::b", rule=half_last("x"))) == "a::b -> new (*x.shape[:-1], x.shape[-1] // 2) of x's dtype"
    assert str(FakeOp(op="a::b", rule=nothing, writes=("out",))) == "a::b -> nothing; writes out"
    assert str(FakeOp(op="a::b", rule=faked, also_writes=("x", "y"))) == "a::b -> faked; writes x, y"


def test_defaults_are_filled_in_where_the_dispatcher_leaves_them_out() -> None:
    rule = results(like("x"), new(size("x", 0), arg("n"), like="x"))
    assert apply(FakeOp(op="fakes_test::halves", rule=rule)).applied
    with FakeTensorMode():
        x = torch.empty(5, 8)
        shapes = [tuple(each.shape) for each in torch.ops.fakes_test.halves(x)]
        assert shapes == [(5, 8), (5, 2)]
        assert torch.ops.fakes_test.halves(x, n=7)[1].shape == (5, 7)


def test_an_argument_that_is_returned_is_that_argument() -> None:
    fake = FakeOp(op="fakes_test::first", rule=argument("x"), writes=("x", "y"), also_writes=("z",))
    result = apply(fake)
    assert result.reason == "registered; the kernel also writes z, which its schema does not declare"
    with FakeTensorMode():
        x, y = torch.empty(3), torch.empty(3)
        assert torch.ops.fakes_test.first(x, y, y) is x


@pytest.mark.parametrize(
    ("fields", "phrases"),
    [
        ({"rule": like("y")}, ("its rule reads y; the op has x",)),
        ({"rule": like(1)}, ("its rule reads argument 1; the op has x",)),
        ({"rule": new(arg("x"))}, ("its rule reads x as int; the schema has it as Tensor",)),
        ({"rule": nothing}, ("its rule gives no result; the op returns Tensor",)),
        ({"rule": results(like(), like())}, ("its rule gives 2 results; the op returns Tensor",)),
        ({"rule": argument("x")}, ("result 0 is x itself; the schema says new memory",)),
        ({"rule": like(), "writes": ("x",)}, ("says that the op writes x; the schema says nothing",)),
        ({"rule": lambda: None}, ("its rule takes (); the op is called with (x)",)),
    ],
)
def test_a_fake_that_contradicts_the_schema_is_refused(fields: dict[str, Any], phrases: tuple[str, ...]) -> None:
    with refused(PluginError, "fake kernel for 'fakes_test::late'", *phrases):
        apply(FakeOp(op="fakes_test::late", **fields))
    assert not has_fake("fakes_test::late")
    skipped = apply(FakeOp(op="fakes_test::late", changes=True, **fields))
    assert not skipped.applied
    assert skipped.reason.startswith("op fakes_test::late is another version here: ")


def test_what_another_version_wrote_is_no_mistake(library: torch.library.Library) -> None:
    library.define("renamed(Tensor x) -> Tensor")
    fake = FakeOp(op="fakes_test::renamed", rule=like(), also_writes=("out",))
    with refused(PluginError, "says that the op writes out; the op has x"):
        apply(fake)
    assert apply(replace(fake, changes=True)) == FakeResult(applied=True, reason="registered")


@pytest.mark.parametrize(
    ("op", "schema", "rule", "problem"),
    [
        ("aliased", "(Tensor(a!) x) -> Tensor(a!)", like(), "result 0 new memory; the schema says that of x"),
        ("lists", "(Tensor x) -> Tensor[]", like(), "gives tensors; the op returns Tensor[] (write the rule as a func"),
        (
            "drifts",
            "(Tensor x, float eps=0.5) -> Tensor",
            lambda x, eps: x.clone(),
            "the op is called with (x): missing",
        ),
        ("typed", "(Tensor x, bool on) -> Tensor", like(dtype="on"), "reads on as dtype; the schema has it as bool"),
    ],
)
def test_a_rule_that_contradicts_another_schema_is_refused(
    library: torch.library.Library, op: str, schema: str, rule: Any, problem: str
) -> None:
    library.define(f"{op}{schema}")
    with refused(PluginError, f"fakes_test::{op}", problem):
        apply(FakeOp(op=f"fakes_test::{op}", rule=rule))


def test_the_dtype_may_be_that_of_an_argument(library: torch.library.Library) -> None:
    library.define("cast(Tensor x, ScalarType to, Tensor other) -> (Tensor, Tensor)")
    rule = results(like("x", dtype="to"), new(2, like="x", dtype="other"))
    assert apply(FakeOp(op="fakes_test::cast", rule=rule)).applied
    with FakeTensorMode():
        one, other = torch.ops.fakes_test.cast(torch.empty(3), torch.int8, torch.empty(1, dtype=torch.float64))
    assert (one.dtype, other.dtype, tuple(other.shape)) == (torch.int8, torch.float64, (2,))


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs/fakes.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"torch": torch, "linear_samples": None}
    exec(code, names)
    assert [each.op for each in names["FAKES"]] == [
        "acme::silu_and_mul",
        "acme::add_norm_",
        "acme::linear",
        "acme::route",
    ]
    rules = {each.strip("` |").partition("(")[0] for each in page.splitlines() if each.startswith("| `")}
    assert {"like", "half_last", "with_last", "new", "argument", "part", "results"} <= rules
