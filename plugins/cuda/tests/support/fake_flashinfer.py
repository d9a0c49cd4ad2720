"""A stand-in for FlashInfer 0.6.12: it computes by torch, takes only what the library takes, and plans as that does.

Attention reads its schedule from the plan's memory, tile by tile, as the library's kernels do: a schedule that is
wrong gives wrong numbers here too.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_flashinfer_attention import Wrapper
from torch import Tensor
from torch.nn import functional

HALF = (torch.bfloat16, torch.float16)
MODULES = ("norm", "activation", "attention", "gemm", "core", "env")


def _rows(out: Tensor, x: Tensor, enable_pdl: Any) -> None:
    assert x.dtype in HALF and out.dtype == x.dtype and x.dim() == 2 == out.dim()
    assert x.stride(1) == 1 == out.stride(1) and isinstance(enable_pdl, bool)


def _norm(shift: float) -> Any:
    def norm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Tensor:
        _rows(out, input, enable_pdl)
        assert weight.dtype == input.dtype and weight.shape == input.shape[1:] and weight.is_contiguous()
        wide = input.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        result: Tensor = out.copy_(wide * (weight.float() + shift))
        return result

    return norm


def _gate(activation: Any) -> Any:
    def gate(input: Tensor, out: Any = None, enable_pdl: Any = None) -> Tensor:
        _rows(out, input, enable_pdl)
        assert input.is_contiguous() and out.is_contiguous() and input.shape[1] == 2 * out.shape[1]
        assert input.shape[1] * input.element_size() % 16 == 0
        gated, up = input.float().chunk(2, -1)
        result: Tensor = out.copy_(activation(gated) * up)
        return result

    return gate


def bmm_fp8(
    A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: Any, out: Any = None, backend: str = ""
) -> Tensor:
    assert A.dtype == B.dtype == torch.float8_e4m3fn and dtype in HALF and backend == "cublas"
    assert A.is_contiguous() and B.stride(1) == 1 and B.stride(2) == B.shape[1]  # column by column
    assert A_scale.numel() == B_scale.numel() == 1 and A_scale.dtype == B_scale.dtype == torch.float32
    assert not A.shape[2] % 16 and not B.shape[2] % 16 and A.shape[2] == B.shape[1]
    result: Tensor = out.copy_(A.float() @ B.float() * A_scale * B_scale)
    return result


def fp8_blockscale_gemm_sm90(
    input: Tensor, weight: Tensor, input_scale: Any = None, weight_scale: Any = None, out: Any = None
) -> Tensor:
    (rows, depth), columns = input.shape, weight.shape[0]
    assert input.dtype == weight.dtype == torch.float8_e4m3fn and out.dtype == torch.bfloat16
    assert input.is_contiguous() and weight.is_contiguous() and not depth % 128 and not columns % 64
    assert weight_scale.shape == (columns // 128, depth // 128) and weight_scale.is_contiguous()
    # The kernel is given an address alone: columns of scales, each padded to whole 16 bytes.
    padded = -(-rows // 4) * 4
    scales = input_scale.as_strided((rows, depth // 128), (1, padded))
    x = input.float() * scales.repeat_interleave(128, 1)
    w = weight.float() * weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    result: Tensor = out.copy_(x @ w.t())
    return result


class Spec:
    """A module that is to be compiled."""

    def __init__(self, env: Any, name: str) -> None:
        self.name, self.build_dir = name, Path(env.FLASHINFER_JIT_DIR) / name
        self.jit_library_path = self.build_dir / f"{name}.so"


def _jit(base: Path, built: list[str]) -> dict[str, ModuleType]:
    """Return the modules below `flashinfer.jit`; built: takes the names of what is compiled."""
    modules = {name: ModuleType(f"flashinfer.jit.{name}") for name in MODULES}
    env: Any = modules["env"]
    env.FLASHINFER_JIT_DIR, env.FLASHINFER_AOT_DIR = base / "cached_ops", base / "no_such"

    def build(specs: list[Spec], verbose: bool = False, skip_prebuilt: bool = True) -> None:
        for spec in specs:
            built.append(spec.name)
            spec.build_dir.mkdir(parents=True)
            spec.jit_library_path.write_text(spec.name)
            (spec.build_dir / "a.o").write_text("object")

    def attention(backend: str, q: Any, kv: Any, o: Any, index: Any, size: int, v: int, *options: Any) -> Spec:
        assert q == kv == o and index == torch.int32 and size == v and options[0] == 0 and options[3] is False
        kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[q]
        name = "batch_prefill_with_kv_cache_" + "".join(f"dtype_{each}_{kind}_" for each in ("q", "kv", "o"))
        name += f"dtype_idx_i32_head_dim_qk_{size}_head_dim_vo_{size}_posenc_0_use_swa_{options[1]}_"
        return Spec(env, name + f"use_logits_cap_{options[2]}_f16qk_False" + "_sm90" * (backend == "fa3"))

    made: dict[str, dict[str, Any]] = {
        "norm": {"gen_norm_module": lambda: Spec(env, "norm")},
        "activation": {"gen_act_and_mul_module": lambda name: Spec(env, f"{name}_and_mul")},
        "attention": {"gen_batch_prefill_module": attention},
        "gemm": {
            "gen_gemm_module": lambda: Spec(env, "gemm"),
            "gen_fp8_blockscale_gemm_sm90_module": lambda: Spec(env, "fp8_blockscale_gemm_90"),
        },
        "core": {"build_jit_specs": build},
    }
    for name, functions in made.items():
        for each, function in functions.items():
            setattr(modules[name], each, function)
    return modules


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str = "0.6.12") -> SimpleNamespace:
    """Make the stand-in what is imported as `flashinfer`; return it, with the names of what it compiled as `built`."""
    from core_cuda.flashinfer import planning, presence

    built: list[str] = []
    jit, module = ModuleType("flashinfer.jit"), ModuleType("flashinfer")
    for name, each in _jit(folder / "jit", built).items():
        setattr(jit, name, each)
        monkeypatch.setitem(sys.modules, f"flashinfer.jit.{name}", each)
    functions = {
        "jit": jit,
        "rmsnorm": _norm(0.0),
        "gemma_rmsnorm": _norm(1.0),
        "silu_and_mul": _gate(functional.silu),
        "gelu_and_mul": _gate(functional.gelu),
        "gelu_tanh_and_mul": _gate(lambda x: functional.gelu(x, approximate="tanh")),
        "gemm": SimpleNamespace(bmm_fp8=bmm_fp8, fp8_blockscale_gemm_sm90=fp8_blockscale_gemm_sm90),
        "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder / "kept"))
    for name in ("TRTLLM_DG_CACHE_DIR", "FLASHINFER_USE_CUDA_NORM"):
        monkeypatch.setenv(name, "1")  # `load` leaves what is set, so nothing of it is left behind
    install(monkeypatch, version)
    monkeypatch.setattr(planning, "_PLANNED", {})
    assert presence.why_not() == "" or version != "0.6.12"
    return SimpleNamespace(module=module, built=built, folder=folder)


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Have a version of FlashInfer found as installed, or none."""
    from core_cuda.flashinfer import presence

    real = metadata.version

    def found(name: str) -> str:
        if name != presence.PACKAGE:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    forget()


def forget() -> None:
    """Have it asked anew whether FlashInfer is there."""
    from core_cuda.flashinfer import presence

    for each in (presence.installed, presence.why_not, presence.load):
        each.cache_clear()
