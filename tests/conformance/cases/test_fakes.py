"""core_conformance/cases/fakes.py: true fakes pass; wrong shapes, dtypes, strides, aliases and writes are found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.fakes import FakeOp, FakeResult, half_last
from core.common.ops.canonical import OPS
from core.common.ops.declaration import Sample
from core.common.ops.implementation import OpImplementation
from core.common.ops.norm.norms import RMS_NORM
from core.device import Device
from core_conformance.case import Case
from core_conformance.cases.fakes import collect
from core_conformance.trial import NotSupported, Trial
from tests.recording import acme
from tests.support import cpu

Fake = Callable[..., Any]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return RMS_NORM.reference(x, weight, eps)


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = norm(x, weight, eps)
    x.add_(1)
    return result


def norm_by_columns(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps).t().contiguous().t()


def like_x(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


KERNELS: dict[str, tuple[Fake, Fake]] = {
    "right": (norm, like_x),
    "shape": (norm, lambda x, weight, eps: x.new_empty(x.shape[0], 2 * x.shape[1])),
    "dtype": (norm, lambda x, weight, eps: torch.empty_like(x, dtype=torch.float64)),
    "strides": (norm_by_columns, like_x),
    "alias": (lambda x, weight, eps: x, like_x),
    "fake_alias": (norm, lambda x, weight, eps: x),
    "mutation": (norm_in_place, like_x),
    "tensors": (lambda x, weight, eps: norm(x, weight, float(x.sum()) * 0 + eps), lambda x, weight, eps: _sum(x)),
}
"""A kernel and its fake; all but the first do not fit."""


def _sum(x: Tensor) -> Tensor:
    return torch.empty_like(x) * float(x.sum())


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    lib = torch.library.Library("conformance_test", "DEF")
    for name, (kernel, fake) in KERNELS.items():
        lib.define(f"{name}(Tensor x, Tensor weight, float eps) -> Tensor")
        lib.impl(name, kernel, "CPU")
        torch.library.register_fake(f"conformance_test::{name}", fake, lib=lib)
    for name, fake in (("aliased", lambda x: x), ("forgotten", torch.empty_like)):
        lib.define(f"{name}(Tensor(a!) x) -> Tensor(a!)")
        lib.impl(name, lambda x: x.add_(1), "CPU")
        torch.library.register_fake(f"conformance_test::{name}", fake, lib=lib)
    for name, fake in (("parts", _parts), ("apart", lambda x: (torch.empty_like(x), x.new_empty(x.shape)[:, :2]))):
        lib.define(f"{name}(Tensor x) -> (Tensor, Tensor)")
        lib.impl(name, _parts, "CPU")
        torch.library.register_fake(f"conformance_test::{name}", fake, lib=lib)
    lib.define("kernelless(Tensor x) -> Tensor")
    torch.library.register_fake("conformance_test::kernelless", torch.empty_like, lib=lib)
    lib.define("picky(Tensor x) -> Tensor")
    lib.impl("picky", _rank_two, "CPU")
    torch.library.register_fake("conformance_test::picky", torch.empty_like, lib=lib)
    lib.define("found(Tensor x) -> Tensor")
    lib.impl("found", lambda x: x[x != 0].clone(), "CPU")
    torch.library.register_fake("conformance_test::found", _of_some_size, lib=lib)
    lib.define("found_wide(Tensor x) -> Tensor")
    lib.impl("found_wide", lambda x: x[x != 0].double(), "CPU")
    torch.library.register_fake("conformance_test::found_wide", _of_some_size, lib=lib)
    lib.define("fill(Tensor x, Tensor[] out) -> ()")
    lib.impl("fill", _fill_last, "CPU")
    torch.library.register_fake("conformance_test::fill", lambda x, out: None, lib=lib)
    lib.define("space(Tensor x) -> Tensor")
    lib.impl("space", lambda x: torch.full_like(x, float(next(_NUMBERS))), "CPU")
    torch.library.register_fake("conformance_test::space", torch.empty_like, lib=lib)
    lib.define("untaught(Tensor x) -> Tensor")
    lib.impl("untaught", lambda x: x.clone(), "CPU")
    yield lib
    lib._destroy()


_NUMBERS = itertools.count()


def _rank_two(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise NotImplementedError(f"rank {x.dim()}")
    return x.clone()


def _fill_last(x: Tensor, out: list[Tensor]) -> None:
    out[-1].copy_(x)


def _of_some_size(x: Tensor) -> Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(),))


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.clone()
    return whole, whole[:, :2]


def calling(name: str) -> OpImplementation:
    """Return an implementation of rms_norm that calls one of the custom ops above."""

    def fn(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
        assert weight is not None
        out: Tensor = getattr(torch.ops.conformance_test, name)(x, weight, eps)
        return out

    def condition(call: Any) -> str | None:
        x, rest = call.args["x"], ("compute_dtype", "normed_dtype", "weight_dtype", "out_dtype")
        plain = x.dim() == 2 and x.is_contiguous() and call.args["weight"] is not None and not call.args["offset"]
        return None if plain and not any(call.args[each] for each in rest) else "contiguous rows in one dtype only"

    return OpImplementation(op="core::rms_norm", name=name, fn=fn, condition=condition)


def trial_of(device: Device, case: str) -> Trial:
    trial = Trial(device.name, lambda: (device, ConformanceProfile()))
    found(device)[f"fakes/{case}"].run(trial)
    return trial


def found(device: Device) -> dict[str, Case]:
    return {case.id: case for case in collect(device, ConformanceProfile())}


def with_fake(name: str, result: FakeResult | None = None, **fields: Any) -> Device:
    declared = FakeOp(op=name, rule=half_last(), **fields)
    return cpu(fakes=((declared, result or FakeResult(applied=True, reason="registered")),))


def rows(device: torch.device) -> Iterator[Sample]:
    x, weight = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    yield Sample(name="rows", kwargs={"x": x, "weight": weight, "eps": 1e-5})


@pytest.mark.slow
def test_canonical_ops_pass() -> None:
    device = acme()
    own = {f"fakes/{each.op.removeprefix('core::')}/{each.name}" for each in device.ops}
    # The cpu plugin, on whose device this one is built, declares fakes for these libraries.
    absent = {f"fakes/foreign/{library}" for library in ("sgl_kernel", "torch_ipex")}
    assert set(found(device)) == {f"fakes/{op.name}/reference" for op in OPS} | own | absent
    for case in ("add_rms_norm/reference", "quantized_linear/reference", "rms_norm/acme_rms_norm"):
        trial = trial_of(device, case)
        assert not trial.failures and {"T0"} == {each.criterion for each in trial.measurements}


def test_a_custom_op_that_an_implementation_calls_is_found_and_checked() -> None:
    trial = trial_of(cpu(ops=(calling("right"),)), "rms_norm/right")
    assert not trial.failures
    assert trial.notes == ["custom ops checked: conformance_test::right"]
    checked = {each.name for each in trial.measurements}
    assert {
        f"conformance_test::right, call 1, test_{x}" for x in ("schema", "faketensor", "aot_dispatch_dynamic")
    } <= checked


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("shape", "result 0 against the fake: (9, 48) float32 strides (48, 1) instead of (9, 96)"),
        ("dtype", "instead of (9, 48) float64"),
        ("strides", "strides (1, 9) instead of (9, 48) float32 strides (48, 1)"),
        ("alias", "result 0 shares memory with argument 'x'"),
        ("fake_alias", "the fake's result 0 shares memory with argument 'x', and the kernel's does not"),
        ("mutation", "writes its argument 'x', which the schema does not declare"),
        ("tensors", "runs on real tensors and raises on fake ones: DataDependentOutputException"),
    ],
)
def test_a_fake_that_does_not_fit_is_rejected(name: str, reason: str) -> None:
    implemented = trial_of(cpu(ops=(calling(name),)), f"rms_norm/{name}")
    assert any(reason in each for each in implemented.failures), implemented.failures
    by_torch = [each for each in implemented.measurements if each.reason and "conformance_test::" in each.name]
    assert by_torch or name == "strides", "torch finds these too, but strides only in later releases"
    foreign = trial_of(with_fake(f"conformance_test::{name}", samples=rows), f"foreign/conformance_test.{name}")
    assert foreign.failures and all("\n" not in each for each in foreign.failures)


@pytest.mark.slow
def test_an_implementation_that_can_not_be_traced_is_rejected() -> None:
    def fn(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
        return RMS_NORM.reference(x, weight, eps + 0 * float(x.nansum()), **options)

    device = cpu(ops=(OpImplementation(op="core::rms_norm", name="reads", fn=fn),))
    assert "runs on real tensors and raises on fake ones" in trial_of(device, "rms_norm/reads").failures[0]


def test_an_implementation_that_refuses_everything_is_not_supported() -> None:
    device = cpu(ops=(replace(calling("right"), condition=lambda call: "not today"),))
    with pytest.raises(NotSupported, match="not today"):
        trial_of(device, "rms_norm/right")


def test_a_foreign_fake_with_samples_is_compared() -> None:
    trial = trial_of(with_fake("conformance_test::right", samples=rows), "foreign/conformance_test.right")
    assert not trial.failures and trial.measurements


def matrices(device: torch.device) -> Iterator[Sample]:
    yield Sample(name="rows", kwargs={"x": torch.ones(3, 8, device=device)})


@pytest.mark.parametrize(
    ("name", "failures"),
    [
        ("aliased", []),
        ("forgotten", ["rows: result 0 shares memory with argument 'x', and the fake's does not"]),
        ("parts", []),
        ("apart", ["rows: results 0 and 1 share memory"]),
    ],
)
def test_declared_aliases_of_a_foreign_op_are_compared(name: str, failures: list[str]) -> None:
    trial = trial_of(with_fake(f"conformance_test::{name}", samples=matrices), f"foreign/conformance_test.{name}")
    # The strides of a part of another result differ from those of one by itself as well.
    assert [each for each in trial.failures if "share" in each] == failures


@pytest.mark.parametrize("samples", [None, lambda device: []])
def test_a_foreign_fake_without_samples_is_no_pass(samples: Any) -> None:
    trial = trial_of(with_fake("conformance_test::right", samples=samples), "foreign/conformance_test.right")
    assert trial.failures == ["the fake of conformance_test::right can't be checked: give FakeOp.samples"]


def ranks(device: torch.device) -> Iterator[Sample]:
    yield from matrices(device)
    yield Sample(name="a vector", kwargs={"x": torch.ones(3, device=device)})


def no_such_chip(device: torch.device) -> Iterator[Sample]:
    raise NotImplementedError("another chip's op")
    yield  # what makes it a generator


def test_an_op_without_a_kernel_for_the_device_is_not_supported() -> None:
    with pytest.raises(NotSupported, match="Could not run 'conformance_test::kernelless'"):
        trial_of(with_fake("conformance_test::kernelless", samples=ranks), "foreign/conformance_test.kernelless")
    with pytest.raises(NotSupported, match="another chip's op"):
        trial_of(with_fake("conformance_test::right", samples=no_such_chip), "foreign/conformance_test.right")


def test_an_op_that_refuses_some_samples_fails() -> None:
    trial = trial_of(with_fake("conformance_test::picky", samples=ranks), "foreign/conformance_test.picky")
    assert trial.failures == ["a vector: raises NotImplementedError: rank 1"]
    assert trial.measurements, "the other sample was judged"


def test_an_op_that_raises_anything_else_on_every_sample_fails() -> None:
    def wrong(device: torch.device) -> Iterator[Sample]:
        yield Sample(name="rows", kwargs={"x": torch.ones(3, 8), "weight": torch.ones(5), "eps": 1e-5})

    trial = trial_of(with_fake("conformance_test::right", samples=wrong), "foreign/conformance_test.right")
    assert trial.failures and trial.failures[0].startswith("rows: raises")


@pytest.mark.parametrize(("name", "failures"), [("found", []), ("found_wide", ["(24,) float64"])])
def test_a_size_that_only_a_run_can_tell_fits_any(name: str, failures: list[str]) -> None:
    trial = trial_of(with_fake(f"conformance_test::{name}", samples=matrices), f"foreign/conformance_test.{name}")
    against = [each for each in trial.failures if "against the fake" in each]
    assert len(against) == len(failures) and all(text in each for text, each in zip(failures, against, strict=True))


def test_a_write_into_a_list_of_tensors_is_seen() -> None:
    def lists(device: torch.device) -> Iterator[Sample]:
        yield Sample(name="two", kwargs={"x": torch.ones(3), "out": [torch.zeros(2), torch.zeros(3)]})

    trial = trial_of(with_fake("conformance_test::fill", samples=lists), "foreign/conformance_test.fill")
    assert "two: writes its argument 'out', which the schema does not declare" in trial.failures


def test_memory_that_nobody_writes_is_not_compared() -> None:
    case, unequal = "foreign/conformance_test.space", "test_aot_dispatch_dynamic"
    compared = trial_of(with_fake("conformance_test::space", samples=matrices), case)
    assert any(unequal in each for each in compared.failures)
    declared = trial_of(with_fake("conformance_test::space", samples=matrices, unwritten=True), case)
    assert not declared.failures and not any(unequal in each.name for each in declared.measurements)
    assert declared.notes == ["not run in a traced graph: its results are memory that it leaves as it was"]


def test_ops_that_return_their_arguments_are_not_traced_where_torch_can_not() -> None:
    trial = trial_of(with_fake("conformance_test::aliased", samples=matrices), "foreign/conformance_test.aliased")
    assert not trial.failures and "torch functionalizes no op that returns its arguments" in trial.notes[0]


def test_a_library_that_is_absent_is_not_supported() -> None:
    absent = FakeResult(applied=False, reason="op absent::Gate is not loaded in this process")
    case = found(with_fake("absent::Gate", absent))["fakes/foreign/absent.gate"]
    assert case.not_supported == absent.reason


def test_an_implementation_whose_library_is_absent_is_not_called() -> None:
    def imports(*_: Any, **__: Any) -> Tensor:
        raise ModuleNotFoundError("No module named 'absent'")

    lacking = OpImplementation(op="core::rms_norm", name="absent_norm", fn=imports, missing="absent is not installed")
    with pytest.raises(NotSupported, match="absent is not installed"):
        trial_of(cpu(ops=(lacking,)), "rms_norm/absent_norm")


def test_a_whole_library_that_is_absent_is_one_case() -> None:
    absent = FakeResult(applied=False, reason="not installed here")
    device = cpu(fakes=tuple((FakeOp(op=f"nowhere::{name}", rule=half_last()), absent) for name in "abc"))
    (case,) = (case for case in found(device).values() if "foreign" in case.id)
    assert (case.id, case.not_supported) == ("fakes/foreign/nowhere", "op library nowhere is not loaded here")
    assert "the 3 fake kernels declared for nowhere" in case.what


def test_an_op_without_a_fake_is_rejected() -> None:
    def some(device: torch.device) -> Iterator[Sample]:
        yield Sample(name="rows", kwargs={"x": torch.ones(3, 8, device=device)})

    trial = trial_of(with_fake("conformance_test::untaught", samples=some), "foreign/conformance_test.untaught")
    assert "rows: runs on real tensors and raises on fake ones" in trial.failures[0]
