"""FlashInfer as a `KernelCompiler`: which of its modules are built ahead, and how they are built."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from core.common.kernel_compilers import KernelCompiler, KernelForms
from core.errors import UsageError, one_line
from core_cuda.flashinfer import folder, presence
from core_cuda.ops import launching

BLOCKS = "fp8_blockscale_gemm_90"
"""FlashInfer's name for the module of block-scaled products."""
NORM = "norm"
GATES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
"""FlashInfer's names of gates by ours."""
HALF = (torch.bfloat16, torch.float16)
HOPPER = (9, 0)
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16"}


def attention_module(backend: str, dtype: torch.dtype, size: int, *, window: bool, softcap: bool) -> str:
    """Return FlashInfer's name for the module of prefill attention over pages, heads of `size`, tables of int32."""
    kind = _SHORT[dtype]
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{kind}_dtype_kv_{kind}_dtype_o_{kind}_dtype_idx_i32_"
        f"head_dim_qk_{size}_head_dim_vo_{size}_posenc_0_use_swa_{window}_use_logits_cap_{softcap}_f16qk_False"
        + ("_sm90" if backend == "fa3" else "")
    )


def not_ahead(name: str) -> str | None:
    """Return why a module is not timed: nothing that is not built ahead is compiled for a timing."""
    if folder.is_ahead(name, presence.installed()):
        return None
    return f"FlashInfer's {name} is not built ahead (core kernels build --device cuda --provider flashinfer)"


def build(forms: KernelForms) -> Iterator[str]:
    """Build the modules for these forms and yield their names; those that lie in the folder already are kept."""
    if reason := presence.why_not():
        raise UsageError("building kernels of FlashInfer", found=reason, remedy="install it, and build them again")
    kept = folder.ahead(presence.installed())
    if kept is None:
        raise UsageError(
            "building kernels of FlashInfer",
            found=f"{folder.VARIABLE} names no folder that only this user may write to",
            remedy="give another folder by --out",
        )
    presence.load()
    core: Any = importlib.import_module("flashinfer.jit.core")
    specs = list(_specs(forms))
    failed = _compile(core, [each for each in specs if not folder.library(kept, each.name).is_file()])
    for spec in (each for each in specs if each.name not in failed):
        _keep(spec, folder.library(kept, spec.name))
        yield spec.name
    if failed:
        raise UsageError(
            f"building {', '.join(failed)} of FlashInfer",
            found="; ".join(failed.values()),
            remedy="see whether CUDA's compiler and libraries are there; what was built is kept",
        )


def _compile(core: Any, specs: list[Any]) -> dict[str, str]:
    """Compile modules; return why some of them can't be compiled, by name."""
    try:
        core.build_jit_specs(specs, skip_prebuilt=False)  # all at a time, by as many processes as there are cores
        return {}
    except RuntimeError:
        failed = {}
    for spec in specs:
        try:
            core.build_jit_specs([spec], skip_prebuilt=False)
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
            failed[spec.name] = one_line(lines[0])
    return failed


def _keep(spec: Any, library: Path) -> None:
    """Put a compiled library where it is found; nothing is done where it lies there."""
    if library.is_file():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(".part")
    shutil.copyfile(spec.jit_library_path, made)
    made.replace(library)
    shutil.rmtree(spec.build_dir)  # objects, and the library again


def _specs(forms: KernelForms) -> Iterator[Any]:
    """Yield FlashInfer's descriptions of modules."""
    jit: Any = {name: importlib.import_module(f"flashinfer.jit.{name}") for name in ("norm", "activation", "attention")}
    gemm: Any = importlib.import_module("flashinfer.jit.gemm")
    yield jit["norm"].gen_norm_module()
    for name in GATES.values():
        yield jit["activation"].gen_act_and_mul_module(name)
    yield gemm.gen_gemm_module()
    hopper = launching.capability() == HOPPER
    if hopper:
        yield gemm.gen_fp8_blockscale_gemm_sm90_module()
    variants = [(w, s) for w in {False, forms.window} for s in {False, forms.softcap}]
    for dtype in (each for each in forms.dtypes if each in HALF):
        for size in forms.head_sizes:
            for window, softcap in sorted(variants):
                for backend in ("fa2", "fa3") if hopper and not window else ("fa2",):
                    types = (dtype, dtype, dtype, torch.int32)
                    yield jit["attention"].gen_batch_prefill_module(
                        backend, *types, size, size, 0, window, softcap, False
                    )


def compiler() -> KernelCompiler:
    """Return FlashInfer's compiler as core knows it; its version counts where it is installed."""
    return replace(folder.KEPT, package="" if presence.why_not() else presence.PACKAGE, build=build)
