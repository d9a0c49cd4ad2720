"""`core kernels build`: build kernels of a device's libraries ahead, in a folder that can be carried elsewhere."""

from __future__ import annotations

import os
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from core.host.plugin_metadata import AUTO

if TYPE_CHECKING:
    import torch

    from core.common.kernel_compilers import KernelCompiler, KernelForms
    from core.device import Device


class Action(Enum):
    """What to do with kernels."""

    BUILD = "build"


def kernels(
    action: Action = typer.Argument(..., help="build them."),
    device: str = typer.Option(AUTO, help="Device name."),
    provider: list[str] = typer.Option(
        [], metavar="NAME", help="Whose kernels, may be repeated; default: all that can be built ahead."
    ),
    out: Path | None = typer.Option(None, help="Folder for them; default: beside the compile cache, where runs look."),
    dtype: list[str] = typer.Option(["bfloat16"], help="Dtype of the models, may be repeated."),
    head_size: list[int] = typer.Option([128], min=1, help="Features of an attention head, may be repeated."),
    window: bool = typer.Option(False, "--window", help="Also for attention that sees the latest positions alone."),
    softcap: bool = typer.Option(False, "--softcap", help="Also for attention whose scores are capped softly."),
) -> None:
    """Build kernels that a library compiles at their first use, so that no start of a model waits for them."""
    from core.common.kernel_compilers import KernelForms
    from core.compilation.cache.store import Store
    from core.host.selection import select_device

    opened = select_device(device)
    chosen = _chosen(opened, provider)
    forms = KernelForms(dtypes=tuple(map(_dtype, dtype)), head_sizes=tuple(head_size), window=window, softcap=softcap)
    if out is None:
        Store.of_user().keep_kernels(chosen)
    for compiler in chosen:
        if out is not None:
            os.environ[compiler.folder_variable] = str((out / compiler.name).absolute())
        _build(compiler, forms)
    if out is not None:
        print("\nto use them:")
        for compiler in chosen:
            print(f"  export {compiler.folder_variable}={os.environ[compiler.folder_variable]}")


def _chosen(device: Device, names: list[str]) -> list[KernelCompiler]:
    """Return the compilers of these names, or all that build kernels ahead."""
    from core.errors import UsageError

    able = {each.name: each for each in device.kernel_compilers if each.build is not None}
    unknown = [name for name in names if name not in able]
    if unknown or not able:
        raise UsageError(
            f"building kernels of {', '.join(unknown) or 'any library'} for device {device.name!r}",
            found=f"what builds kernels ahead there: {', '.join(able) or 'nothing'}",
            remedy="choose one of these, or leave --provider out" if able else "choose another device",
        )
    return [able[name] for name in names] or list(able.values())


def _build(compiler: KernelCompiler, forms: KernelForms) -> None:
    assert compiler.build is not None
    start, before = time.perf_counter(), time.perf_counter()
    count = 0
    for name in compiler.build(forms):
        now = time.perf_counter()
        print(f"{compiler.name}: {name}, {now - before:.1f} s", flush=True)
        before, count = now, count + 1
    folder = os.environ.get(compiler.folder_variable, "the compiler's own folder")
    print(f"{compiler.name}: {count} kernels in {folder}, {time.perf_counter() - start:.1f} s")


def _dtype(name: str) -> torch.dtype:
    import torch

    from core.errors import UsageError

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"--dtype {name}", found="torch has no such dtype", remedy="pass one such as bfloat16")
    return found
