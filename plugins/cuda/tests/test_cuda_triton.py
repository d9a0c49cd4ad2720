"""The versions of Triton that the plugin is claimed for, and what the tests mend in the interpreters of these."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

pytest.importorskip("triton", reason="needs triton")
import triton
import triton.language as tl

from core_cuda.ops.launching import launch

RUN = ("3.6.0", "3.7.1")
"""The versions that all tests of the plugin have passed with, in order. A new one is added once they do."""
PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_TWO = tl.constexpr(2.0)


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: what a release with new features changes."""
    major, second, *_ = Version(version).release
    return major, second


@pytest.mark.parametrize("extra", ["cuda", "dev"])
def test_the_project_asks_for_the_versions_that_were_run(extra: str) -> None:
    found = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    (asked,) = [requirement.specifier for requirement in found if requirement.name == "triton"]
    (major, first), (same, last) = minor(RUN[0]), minor(RUN[-1])
    assert same == major and {minor(version) for version in RUN} == {(major, n) for n in range(first, last + 1)}
    assert asked == SpecifierSet(f">={major}.{first},<{major}.{last + 1}")


def test_the_version_here_is_one_that_was_run() -> None:
    assert minor(triton.__version__) in {minor(version) for version in RUN}


@triton.jit
def _cast(x, out, N: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_narrow_dtypes_round_to_the_nearest(dtype: torch.dtype, kernel_device: torch.device) -> None:
    step = torch.finfo(dtype).eps
    steps = torch.tensor([0.25, 0.5, 0.75, 1.25, 1.5, 2.75, 1 / step - 0.25, -0.75])  # the one before last: a carry
    x = 1 + steps * step
    out = torch.empty(8, dtype=dtype, device=kernel_device)
    launch(_cast, (1,), x.to(kernel_device), out, N=8)
    assert torch.equal(out.cpu().float(), x.to(dtype).float())


@triton.jit
def _multiply(x, y, out, N: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def test_products_of_bfloat16_are_of_its_values(kernel_device: torch.device) -> None:
    x, y = (torch.randint(-8, 8, (16, 16), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    out = torch.empty(16, 16, device=kernel_device)
    launch(_multiply, (1,), x.bfloat16().to(kernel_device), y.bfloat16().to(kernel_device), out, N=16)
    assert torch.equal(out.cpu(), (x @ y).float())


@triton.jit
def _subtract(x, y, out, N: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) - tl.load(y + at).to(out.dtype.element_ty))


def test_differences_of_bfloat16_and_integers_are_of_their_values(kernel_device: torch.device) -> None:
    x, y = torch.linspace(-3, 3, 16).bfloat16(), torch.arange(-8, 8, dtype=torch.int8)
    out = torch.empty(16, dtype=torch.bfloat16, device=kernel_device)
    launch(_subtract, (1,), x.to(kernel_device), y.to(kernel_device), out, N=16)
    assert torch.equal(out.cpu(), x - y.bfloat16())


@triton.jit
def _count(sizes, out):  # noqa: ANN001, ANN202
    total = 0
    for step in range(tl.load(sizes), tl.load(sizes + 1)):
        total += step
    tl.store(out, total)


def test_sizes_in_memory_bound_loops(kernel_device: torch.device) -> None:
    out = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    launch(_count, (1,), torch.tensor([3, 7], dtype=torch.int32, device=kernel_device), out)
    assert out.item() == 3 + 4 + 5 + 6


@triton.jit
def _fuse(x, y, z, out):  # noqa: ANN001, ANN202
    tl.store(out, tl.fma(tl.load(x), tl.load(y), tl.load(z)))


def test_fma_rounds_once(kernel_device: torch.device) -> None:
    x, z = torch.tensor([1 + 2.0**-12]), torch.tensor([-1 - 2.0**-11])
    out = torch.empty(1, device=kernel_device)
    launch(_fuse, (1,), *(value.to(kernel_device) for value in (x, x, z)), out)
    assert out.item() == 2.0**-24


@triton.jit
def _double(x, out, LEFT: tl.constexpr):  # noqa: ANN001, ANN202
    value = tl.load(x)
    tl.store(out, _TWO * value if LEFT else value * _TWO)


@pytest.mark.parametrize("kernel_device", ["interpreter"], indirect=True)
def test_constants_on_the_left_of_tensors_are_refused(kernel_device: torch.device) -> None:
    x, out = torch.tensor([3.0]), torch.empty(1)
    launch(_double, (1,), x, out, LEFT=False)
    assert out.item() == 6.0
    with pytest.raises(triton.runtime.errors.InterpreterError, match="write the tensor on the left"):
        launch(_double, (1,), x, out, LEFT=True)
