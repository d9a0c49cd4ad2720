"""`core.optimize`: finds the modules that a pipeline calls, and compiles each in place by the backend."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from core.device import Device
from core.dynamo.backend import backend
from core.dynamo.options import BackendOptions
from core.errors import UsageError
from core.host.selection import select_device

log = logging.getLogger("core.dynamo")
_T = TypeVar("_T")
_PARTS = ("encoder", "decoder")


def optimize(
    target: _T,
    device: str | Device | torch.device | None = None,
    *,
    dynamic: bool | None = None,
    mode: str | None = None,
    **options: Any,
) -> _T:
    """Compile a model, or every model in a pipeline, in place by `torch.compile(backend="core")`, and return it.

    - target: an `nn.Module`, a pipeline of transformers or diffusers, a SentenceTransformer, or any object that holds
      modules as attributes or in a mapping `components`.
    - device: the one that the models have to be on, opened here; None takes for each graph that of its tensors.
    - dynamic, mode: as for `torch.compile`.
    - options: those of the backend (passes, disable_passes, enable_passes, strict, verify, lowering, capture,
      max_shapes); docs/torch-compile.md explains each.

    Nothing is traced before the first call. `core.backend_report()` then says what was done. Raises `UsageError` for
    an object without modules, and for options that the backend does not have, and as `core.select_device` does.
    """
    if device is not None:
        options["device"] = select_device(device)
    BackendOptions.of(options, mode)
    found = dict(_called(target))
    if not found:
        raise UsageError(
            f"core.optimize({target!r:.80})",
            found=f"{type(target).__name__}: no torch.nn.Module, and holds none in its attributes or `components`",
            remedy="pass the model itself; a function is compiled by torch.compile(function, backend='core')",
        )
    if mode is not None and options:
        raise UsageError(
            f"core.optimize(mode={mode!r}) with {', '.join(options)}",
            found="torch.compile takes a mode or options, not both",
            remedy="leave the mode out; capture=True is mode 'reduce-overhead'",
        )
    for module in found.values():
        call: Any = torch.compile(_call(module), backend=backend, dynamic=dynamic, mode=mode, options=options or None)
        module._compiled_call_impl = call  # as `Module.compile` does; copies and pickles of the module leave it out
    log.info("compiled in place: %s", ", ".join(name or type(target).__name__ for name in found))
    return target


def _call(module: nn.Module) -> Callable[..., Any]:
    """Return the module's call as a function with a code object of its own.

    Dynamo skips functions of torch itself, such as the call of an `nn.Sequential`. And it keeps compiled code, and the
    limit of recompiles, per code object: each module has its own here, however many are of one class.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def _called(target: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are called, by their path from the target."""
    if isinstance(target, nn.Module):
        yield from _of_module("", target)
        return
    components = getattr(target, "components", None)
    held = components if isinstance(components, Mapping) else getattr(target, "__dict__", {})
    for name, value in held.items():
        if isinstance(value, nn.Module):
            yield from _of_module(str(name), value)


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those of its parts that its other methods call past its own `__call__`."""
    if isinstance(module, nn.Sequential) and hasattr(module, "encode"):
        # A sentence encoder: `encode` calls `forward`, which calls the parts. The first of these calls its model, in
        # some versions by `forward` as well, so the part is what can be compiled.
        for name, child in module.named_children():
            yield _join(path, name), child
        return
    yield path, module
    if hasattr(module, "get_encoder") or hasattr(module, "encode") or hasattr(module, "decode"):
        # `generate` calls the encoder by itself, and autoencoders have `encode` and `decode` beside `forward`.
        base = getattr(module, "model", module)
        for name in _PARTS:
            for holder, where in ((module, path), (base, _join(path, "model"))):
                part = getattr(holder, name, None)
                if isinstance(part, nn.Module):
                    yield _join(where, name), part


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
