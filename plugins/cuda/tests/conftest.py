"""Fixtures for kernels, and mends of Triton's interpreter, in which they run where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETER, GPU = "interpreter", "gpu"


@pytest.fixture(
    params=[pytest.param(INTERPRETER, marks=pytest.mark.interpreter), pytest.param(GPU, marks=pytest.mark.gpu)]
)
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Yield the device on whose tensors the kernels run: the host's, in Triton's interpreter, and a GPU's."""
    pytest.importorskip("triton", reason="needs triton")
    from core_cuda.ops.launching import INTERPRETED

    if request.param == GPU:
        if not torch.cuda.is_available() or INTERPRETED:
            pytest.skip("needs an NVIDIA GPU and a CUDA build of torch")
        yield torch.device("cuda")
        return
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: unset CUDA devices, or set TRITON_INTERPRET=1")
    _mend(monkeypatch)
    with np.errstate(all="ignore"):  # on a GPU too, what overflows on the way to a limit does so without a word
        yield torch.device("cpu")


@pytest.fixture
def alike_products(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter compute each number of a product alike, as matrix units do: numpy's library does not."""
    if kernel_device.type != "cpu":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        first, second = (x.data if x.dtype.scalar == tl.float32 else self.cast_impl(x, tl.float32).data for x in (a, b))
        found = d.data.copy()
        for k in range(first.shape[1]):
            found += first[:, k, None] * second[None, k, :]
        return interpreter.TensorHandle(found, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend the interpreters of Triton 3.6 and 3.7, of which test_cuda_triton.py has a test for each point.

    Rounding to narrow dtypes: they truncate, or lose a carry. Products and differences of bfloat16, and integers made
    bfloat16: they take the bits for integers, and the reverse.
    Sizes as bounds of loops: 3.6 reads them in a way that numpy 2.4 refuses. fma: they round the product. A constant on
    the left of a tensor: 3.6 takes what 3.7 refuses, so kernels may not hold it under either.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    carriers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    builder = interpreter.InterpreterBuilder
    convert, dot = interpreter._convert_float, builder.create_dot
    subtract, from_signed = builder.create_fsub, builder.create_si_to_fp

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in dtypes or target not in dtypes:
            return convert(data, source, target, rounding)
        # The data is of any numpy dtype of the right width; torch reads the same bits.
        bits = torch.from_numpy(data.copy().view(f"u{data.dtype.itemsize}"))
        values = bits.view(dtypes[source]).to(dtypes[target])
        return values.view(carriers[values.itemsize]).numpy()

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, d, *options)

    def create_fsub(self: Any, x: Any, y: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return subtract(self, x, y)
        return self.cast_impl(subtract(self, *(self.cast_impl(each, tl.float32) for each in (x, y))), tl.bfloat16)

    def create_si_to_fp(self: Any, x: Any, dtype: Any) -> Any:
        if dtype.scalar != tl.bfloat16:
            return from_signed(self, x, dtype)
        return self.cast_impl(from_signed(self, x, tl.float32), dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    make_constant = tl.constexpr.__init__

    def constant(self: Any, value: Any) -> None:
        if isinstance(value, tl.tensor):
            raise TypeError(
                "a tl.constexpr stands on the left of a tensor. The interpreter then takes the result for a constant, "
                "which Triton 3.7 refuses as an operand: write the tensor on the left"
            )
        make_constant(self, value)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[frozenset[int]] = set()

    def patch_lang(fn: Any) -> Any:
        # It patches all of triton.language for each function that a kernel calls, which takes most of a test's time.
        seen = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if seen in done:
            return interpreter._LangPatchScope()
        done.add(seen)
        return patch(fn)

    def run_grid(self: Any, *args: Any, **options: Any) -> Any:
        done.clear()
        return execute(self, *args, **options)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_grid)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
    monkeypatch.setattr(tl.constexpr, "__init__", constant)
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "create_fsub", create_fsub)
    monkeypatch.setattr(builder, "create_si_to_fp", create_si_to_fp)
    monkeypatch.setattr(builder, "create_fma", create_fma)
