"""The worker that calls the ops of one library, real and fake, for `core fakes --check`: one request a call.

A kernel's crash or hang stays in its process.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from core.common.fakes import FakeOp
    from core.device import Device


@dataclass
class _Library:
    """The library and the device, as loaded."""

    device: Device
    ops: list[str]
    #: For each op the calls made so far, and the ones to come.
    calls: dict[str, tuple[list[dict[str, Any]], Iterator[dict[str, Any]]]] = field(default_factory=dict)


@functools.cache
def _opened(name: str, device_name: str, folder: str) -> _Library:
    """Load the library, then open the device, whose plugin's fakes are applied to what is there."""
    from core.host.selection import select_device

    try:
        ops = _load(name)
    except ImportError:
        # It may be what the device's own backend registers; without the device, its error says more than this one.
        device = select_device(device_name)
        ops = _namespace(name)
        if not ops:
            raise
    else:
        device = select_device(device_name)
    _warm_up()
    # From here on use an empty folder: relative paths are loaded, and kernels with guessed names write files.
    os.chdir(folder)
    return _Library(device, ops)


def _warm_up() -> None:
    """Warm up imports of the first comparison, so that their time does not count as a kernel's."""
    import torch

    from core.verify.fakes.parity import compare

    compare(torch.ops.aten.neg.default, {"self": torch.ones(2, 3)})


def _load(library: str) -> list[str]:
    """Load a library and return the ops it brings. library: a file (.so, .py), a namespace of ops, or a module."""
    import torch

    from core.errors import UsageError

    before = _op_names()
    path = Path(library)
    if path.suffix == ".so":
        torch.ops.load_library(str(path.resolve()))
    elif path.suffix == ".py":
        _run_file(path.resolve())
    elif own := _namespace(library):
        return own
    else:
        __import__(library)
    new = sorted(_op_names() - before) or _namespace(library)
    if not new:
        raise UsageError(
            f"op library {library!r}",
            found="loading it registers no op with torch",
            remedy="name the module, the .so or .py file, or the namespace that registers them",
        )
    return new


def _namespace(library: str) -> list[str]:
    """Return the ops of a namespace that are registered, in order of name."""
    return sorted(name for name in _op_names() if name.startswith(f"{library}::"))


def _run_file(path: Path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


def _op_names() -> set[str]:
    import torch

    return set(torch._C._dispatch_get_all_op_names())


def _overload(name: str) -> OpOverload | None:
    """Return the overload that the dispatcher lists under a name, where the default one goes without."""
    from core.common.fakes.schema import find_overload

    return find_overload(name if "." in name.partition("::")[2] else f"{name}.default")


def _describe(library: _Library) -> dict[str, object]:
    from core.common.fakes import has_fake

    ops = []
    for name in library.ops:
        overload = _overload(name)
        if overload is not None:
            ops.append(
                {
                    "op": name,
                    "schema": str(overload._schema),
                    "has_fake": has_fake(name),
                    "declared": _declared(library, name) is not None,
                }
            )
    return {"device": str(library.device), "ops": ops}


def _call(library: _Library, name: str, index: int, *, run: bool) -> dict[str, object]:
    """Compare the op's index-th call, or only describe it. "end": there are no more."""
    from core.verify.fakes.calls import NoValue, call_text
    from core.verify.fakes.parity import CallRefused, compare

    overload = _overload(name)
    assert overload is not None
    try:
        call = _nth(library, name, index)
    except (NoValue, NotImplementedError) as error:
        # The second: the plugin's samples know of no kernel on this device.
        return {"state": "impossible", "why": str(error)}
    if call is None:
        return {"state": "end"}
    text = call_text(call)
    if not run:
        return {"state": "described", "call": text}
    try:
        problems = compare(overload, call, library.device.synchronize)
    except CallRefused as error:
        return {"state": "refused", "call": text, "why": str(error)}
    return {"state": "compared", "call": text, "differences": problems}


def _nth(library: _Library, name: str, index: int) -> dict[str, Any] | None:
    """Return a call by its number: those that a plugin declares for the op, or guesses where it declares none."""
    if name not in library.calls:
        library.calls[name] = ([], _calls(library, name))
    made, coming = library.calls[name]
    made.extend(itertools.islice(coming, max(0, index + 1 - len(made))))
    return made[index] if index < len(made) else None


def _calls(library: _Library, name: str) -> Iterator[dict[str, Any]]:
    from core.verify.fakes.calls import guessed_calls

    overload = _overload(name)
    assert overload is not None
    names = {each.name for each in overload._schema.arguments}
    fake = _declared(library, name)
    if fake is None or fake.samples is None:
        yield from guessed_calls(overload._schema, library.device.torch_device)
        return
    for sample in fake.samples(library.device.torch_device):
        # Versions of a library differ in arguments; a call that lacks one without a default is refused.
        yield {key: value for key, value in sample.kwargs.items() if key in names or not fake.changes}


def _declared(library: _Library, name: str) -> FakeOp | None:
    """Return the device's declaration for an op, if it brings samples."""
    found = (fake for fake, _ in library.device.fakes if fake.op == name and fake.samples is not None)
    return next(found, None)


def answer(request: dict[str, Any]) -> dict[str, object]:
    """Answer a request: {"do": "open"}, or {"do": "call" or "describe", "op": name, "index": number of the call}.

    Each request holds `library`, `device` and `folder` as well, where the kernels run.
    """
    from core.errors import CoreError, broken_extension, error_json

    try:
        library = _opened(request["library"], request["device"], request["folder"])
        if request["do"] == "open":
            return _describe(library)
        return _call(library, request["op"], request["index"], run=request["do"] == "call")
    except CoreError as error:
        return {"error": error_json(error)}
    except Exception as error:
        if request["do"] != "open":
            raise
        unloadable = broken_extension(f"device {request['device']!r}", error)
        if unloadable is not None:
            return {"error": error_json(unloadable)}
        return {"failure": " ".join(f"{type(error).__name__}: {error}".split())}
