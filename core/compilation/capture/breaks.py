"""Break points: functions that run eagerly between the graphs of a segmented capture.

A break point is set from outside, by module path (`breaks_at`), by a decorator (`eager_break`), or by a piecewise
compile at marked ops. Outside of a capture it is the function it stands for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from core.errors import CaptureError, UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Breaker(Protocol):
    """Decides what happens at a break point: runs `fn`, and returns what the code around the break point sees."""

    def __call__(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function of the break point `name`."""


Held = tuple[Any, str]
"""An object, and the name of an attribute of it; of a dict, a key."""


class _State(threading.local):
    breaker: Breaker | None = None
    #: What the call that this thread is in has set for its time.
    held: Sequence[Held] = ()


_state = _State()


def current_breaker() -> Breaker | None:
    """Return the breaker that handles this thread's break points; None if they are plain calls."""
    return _state.breaker


@contextmanager
def breaking(breaker: Breaker | None) -> Iterator[None]:
    """Let `breaker` handle this thread's break points inside the block; None makes them plain calls."""
    before, _state.breaker = _state.breaker, breaker
    try:
        yield
    finally:
        _state.breaker = before


def call_break(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` as the break point `name`."""
    breaker = _state.breaker
    return fn(*args, **kwargs) if breaker is None else breaker(name, fn, args, kwargs)


def hold(held: Sequence[Held]) -> None:
    """State what a call sets for its own time, such as the tensors of a step that modules read; nothing at its end.

    A break point that is reached meanwhile finds it as it was, at replays too, where nothing sets it. A trace looks
    through this.
    """
    if not torch.compiler.is_compiling():
        _state.held = held


class HeldValues:
    """What is held at a break point: how it was there."""

    def __init__(self) -> None:
        self._values = tuple((*each, get_held(*each)) for each in _state.held)

    def __bool__(self) -> bool:
        return bool(self._values)

    @contextmanager
    def set(self, asked: str) -> Iterator[None]:
        """Set it for a block; raise `CaptureError` where the block set it otherwise. asked: the error's first line."""
        before = [get_held(holder, name) for holder, name, _ in self._values]
        try:
            for holder, name, value in self._values:
                put_held(holder, name, value)
            yield
            changed = [
                f"{type(h).__name__}.{name}" for h, name, value in self._values if get_held(h, name) is not value
            ]
        finally:
            for (holder, name, _), value in zip(self._values, before, strict=True):
                put_held(holder, name, value)
        if changed:
            raise CaptureError(
                asked,
                found=f"it sets {', '.join(changed)}, which the code after it reads: that would be frozen",
                remedy="take a module inside of it as the break point",
            )


def get_held(holder: Any, name: Any) -> Any:
    """Return what is held at this place, a key of a dict or an attribute."""
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def put_held(holder: Any, name: Any, value: Any) -> None:
    """Put a value at this place."""
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def eager_break(fn: _Function) -> _Function:
    """Mark a function to run eagerly between the graphs of a segmented capture; elsewhere it is called as it is.

    It takes and returns tensors (or None, or containers of these) whose shapes and dtypes are the same at each call
    with inputs of the same shapes; what it returns is copied into static memory.
    """
    name = getattr(fn, "__qualname__", type(fn).__name__)

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a trace looks through it
            return fn(*args, **kwargs)
        return call_break(name, fn, args, kwargs)

    return call  # type: ignore[return-value]  # same signature


@contextmanager
def breaks_at(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Make break points of the modules whose paths match, for the block; yield these paths.

    modules: by path. patterns: as in `fnmatch`, e.g. `model.layers.*.mlp`. Raises `UsageError` for one without match.
    """
    chosen: list[str] = []
    for pattern in patterns:
        found = [path for path in modules if path and fnmatchcase(path, pattern)]
        if not found:
            raise UsageError(
                f"a break point at {pattern!r}",
                found=f"none of {len(modules)} module paths matches; some are: {', '.join(list(modules)[1:6])}",
                remedy="give paths as in model.named_modules(), with * for any part",
            )
        chosen += found
    paths = tuple(dict.fromkeys(chosen))
    touched: list[nn.Module] = []
    try:
        for path in paths:
            _break_at(modules[path], path)
            touched.append(modules[path])
        yield paths
    finally:
        for module in touched:
            _unbreak(module)


class BreakingForward:
    """A module's forward as a break point."""

    def __init__(self, path: str, forward: Callable[..., Any], own: Any) -> None:
        """own: the instance attribute `forward` of the module, if it had one."""
        self.path, self.forward, self.own = path, forward, own
        self.num_users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_break(self.path, self.forward, args, kwargs)


# Two threads may capture one model: the first to finish must not remove the other's break points.
_install_lock = threading.Lock()


def _break_at(module: nn.Module, path: str) -> None:
    with _install_lock:
        own = module.__dict__.get("forward")
        if not isinstance(own, BreakingForward):
            own = module.__dict__["forward"] = BreakingForward(path, module.forward, own)
        own.num_users += 1


def _unbreak(module: nn.Module) -> None:
    with _install_lock:
        installed = module.__dict__["forward"]
        installed.num_users -= 1
        if installed.num_users:
            return
        if installed.own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = installed.own


def modules_of(function: Callable[..., Any]) -> dict[str, nn.Module]:
    """Return the modules that a callable runs, by path: its own if it is one, else those it holds.

    Looks at attributes, a bound method's object and a closure's cells, and at those of callables found there. Paths
    within the only model held have no prefix; of several models each has its own name as prefix.
    """
    held = models_of(function).items()
    return {path: module for name, model in held for path, module in model.named_modules(prefix=name)}


def models_of(function: Callable[..., Any]) -> dict[str, nn.Module]:
    """Return the models whose modules `modules_of` returns, by prefix; "" if there is only one."""
    models: dict[str, nn.Module] = {}
    _collect(function, "", models, depth=3)
    return {"": next(iter(models.values()))} if len({id(model) for model in models.values()}) == 1 else models


def _collect(value: Any, name: str, models: dict[str, nn.Module], *, depth: int) -> None:
    """Add the models that a callable holds, each by the name under which it is held."""
    owner = getattr(value, "__self__", None)
    for candidate in (value, owner):
        if isinstance(candidate, nn.Module):
            models.setdefault(name, candidate)
            return
    if depth == 0 or not callable(value):
        return
    held = {**getattr(value, "__dict__", {}), **getattr(owner, "__dict__", {})}
    code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None) or ()
    for cell_name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            held[cell_name] = cell.cell_contents
        except ValueError:  # a closure cell without a value yet
            continue
    for inner, each in held.items():
        _collect(each, inner, models, depth=depth - 1)


def blamed_module(error: BaseException, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the innermost module whose forward raised, or "" where none but the root did."""
    paths = {id(module): path for path, module in modules.items()}
    found, traceback = "", error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = paths.get(id(owner)) or found
        traceback = traceback.tb_next
    return found
