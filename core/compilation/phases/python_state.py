"""Snapshots the Python state that a callable reaches, to compare and restore it: for captures without a trace.

A capture records what the device does. What Python does on the way (`self.count += 1`) happens in the warm-ups and
while recording, and in no replay. So everything that the callable holds or names is listed before a run, and compared
after it.
"""

from __future__ import annotations

import collections
import functools
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from core.compilation.cache.factors import is_whole
from core.compilation.capture.breaks import breaking, current_breaker
from core.compilation.phases import python_code as code
from core.compilation.phases.python_holders import Holder, holder_of
from core.errors import CaptureError

_LEAVES = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Generator, types.CodeType)
_LIBRARIES = frozenset({"transformers", "tokenizers", "safetensors", "huggingface_hub"})
"""Packages, besides torch, numpy and Python's own, whose functions and classes are not searched; their objects are."""
_UNSEARCHED = frozenset(
    {"logging", "threading", "_thread", "warnings", "weakref", "re", "io", "_io", "concurrent", "multiprocessing"}
)
_SEARCHED = (nn.Module, dict, list, set, collections.deque, threading.local)
"""Types whose objects are searched, whatever package their class is from."""


class StateWatch:
    """Runs a callable before it is captured, and refuses it where the run changes Python state outside break points.

    What happens inside of a break point happens in each replay too: state that it changes is its own to keep.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._state: PythonState | None = None

    def run(self, **arguments: Any) -> Any:
        """Call the callable; raise `CaptureError` where it keeps state, which is put back before."""
        known, self._state = self._state, self._state or PythonState(self._function)
        if self._state.iterator:
            raise _refused(self._state.iterator, "an iterator, which every run moves on and nothing can put back")
        try:
            changed, result = self._observed(self._state, arguments, at_breaks=known is None)
            if changed and known is not None:  # a break point may have made the change, which is allowed
                self._state.restore()
                changed, result = self._observed(self._state, arguments, at_breaks=True)
        except BaseException:
            self._state.restore()
            raise
        if changed:
            self._state.restore()
            raise _refused(changed, "which its runs change outside of break points: no replay would repeat that")
        return result

    def _observed(self, state: PythonState, arguments: Mapping[str, Any], *, at_breaks: bool) -> tuple[str, Any]:
        """Call the callable; return the path of something that it changed outside of break points, and its result."""
        breaker = current_breaker()
        changed = ""

        def at_break(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal changed
            changed = changed or state.change()
            with breaking(breaker):
                result = fn(*args, **kwargs) if breaker is None else breaker(name, fn, args, kwargs)
            state.excuse()
            return result

        with breaking(at_break if at_breaks else breaker):
            result = self._function(**arguments)
        return changed or state.change(), result


def _refused(place: str, why: str) -> CaptureError:
    place = re.sub(r"\b_(?:modules|parameters|buffers)\['(\w+)'\]", r"\1", place)
    return CaptureError(
        f"capturing a callable that keeps Python state in {place}",
        found=f"it reaches {place}, {why}",
        remedy="keep state in a tensor and write into it in place; or take the module that does it as a break point: "
        "options=core.CompileOptions(eager=('its path',)); or mode 'off'. What is set up once, set up before: run the "
        "model a first time",
    )


class PythonState:
    """What a callable can reach of Python objects that can change, as it was when this was made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._holders: list[Holder] = []
        self._excused: list[Holder] = []
        self._seen: dict[int, Any] = {}
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        #: an iterator that the callable reaches: its position can be neither read nor restored
        self.iterator = ""
        self._add_root(function)
        while self._waiting:
            self._visit(*self._waiting.popleft())

    def change(self) -> str:
        """Return the path of one thing that differs now, or ""."""
        return next((place for holder in self._holders for place in holder.changes()), "")

    def excuse(self) -> None:
        """Stop watching everything that differs now."""
        changed = [holder for holder in self._holders if holder.changed]
        self._excused += changed
        self._holders = [holder for holder in self._holders if holder not in changed] if changed else self._holders

    def restore(self) -> None:
        """Put everything back as it was when this was made."""
        for holder in (*self._holders, *self._excused):
            if holder.changed:
                holder.restore()

    def _add_root(self, function: Callable[..., Any]) -> None:
        owner = getattr(function, "__self__", function)
        if not isinstance(owner, (nn.Module, types.FunctionType)) and hasattr(owner, "__dict__"):
            self._see("", owner)  # whatever package its class is from
            self._keep(Holder.of_attributes("", owner))
        self._waiting.append(("", function))
        self._waiting.append(("random", random._inst))
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._waiting.append(("numpy.random", numpy.mtrand._rand))

    def _see(self, path: str, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _keep(self, holder: Holder) -> None:
        """Watch a holder, and visit what it holds."""
        self._holders.append(holder)
        self._waiting += holder.children()

    def _visit(self, path: str, value: Any) -> None:
        if value is None or isinstance(value, _LEAVES) or not self._see(path, value):
            return
        if isinstance(value, torch.Tensor):
            self._keep(Holder.of_attributes(path, value))  # a tensor's numbers are state that graphs move on
            return
        holder = holder_of(path, value)
        if holder is not None:
            self._keep(holder)
        if isinstance(value, (tuple, frozenset)):
            self._waiting += [(f"{path}[{i}]", each) for i, each in enumerate(value)]
        elif isinstance(value, types.FunctionType):
            self._visit_function(path, value)
        elif isinstance(value, types.MethodType):
            self._waiting += [(path, value.__func__), (path, value.__self__)]
        elif isinstance(value, functools.partial):
            self._waiting += [(path, value.func), (path, value.args), (path, value.keywords)]
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.ModuleType) or _is_unsearched(type(value)):
            return
        elif hasattr(value, "__next__") and not hasattr(value, "__dict__"):
            self.iterator = self.iterator or path
        else:
            self._visit_object(path, value)

    def _visit_object(self, path: str, value: Any) -> None:
        if isinstance(getattr(value, "__dict__", None), dict):
            self._keep(Holder.of_attributes(path, value))
        slots = [
            name
            for kind in type(value).__mro__
            for name, member in vars(kind).items()
            if isinstance(member, types.MemberDescriptorType) and not code.is_dunder(name)
        ]
        if slots:
            self._keep(Holder.of_names(path, value, slots))
        self._waiting.append((path, type(value)))

    def _visit_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not _is_library(code.package_of(base)) and self._see("", base) | (base is kind):
                names = [n for n, held in vars(base).items() if not (code.is_dunder(n) or code.unwrapped(held))]
                self._keep(Holder.of_names(base.__name__, base, names, added=True))
                members = [each for held in vars(base).values() for each in code.unwrapped(held)]
                self._waiting += [(f"{base.__name__}.{each.__name__}", each) for each in members]

    def _visit_function(self, path: str, function: types.FunctionType) -> None:
        self._keep(Holder.of_attributes(path, function))
        free = function.__code__.co_freevars
        cells = zip(free, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if self._see(name, cell):
                self._keep(Holder.of_cell(name, cell))
        self._waiting += [(path, function.__defaults__), (path, function.__kwdefaults__)]
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._waiting.append((path, wrapped))
        if _is_library(code.package_of(function)):
            return
        names, space = code.names_of(function), function.__globals__
        self._keep(Holder.of_items(str(space.get("__name__")), space, names))
        for module in [space[name] for name in names if isinstance(space.get(name), types.ModuleType)]:
            if not _is_library(module.__name__.partition(".")[0]):
                self._keep(Holder.of_items(module.__name__, vars(module), names))


def _is_library(package: str) -> bool:
    return is_whole(package, _LIBRARIES) or package.startswith("core_")


def _is_unsearched(kind: type) -> bool:
    """Tell whether objects of a class are left out: locks, loggers and the like, torch's and core's own machinery."""
    package = code.package_of(kind)
    if issubclass(kind, _SEARCHED):
        return False
    return package in _UNSEARCHED or package in ("torch", "core") or package.startswith("core_")
