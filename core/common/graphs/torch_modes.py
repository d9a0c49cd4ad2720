"""Torch modes that begin and end in the middle of running code, whatever scopes that code opens and closes between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


class _TorchFlags:
    """Restores torch's process-wide flags "a mode is on": torch leaves them set if two threads' modes end in crossed
    order.

    A flag left set would make `torch.compile` run eagerly for the rest of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_live = 0
        self._before: dict[str, bool] = {}

    def enter(self) -> None:
        """Save the flags before the first mode of the process is entered."""
        with self._lock:
            if self._num_live == 0:
                known = vars(_python_dispatch).items()
                self._before = {name: value for name, value in known if name.startswith("_is_in_") and value in (0, 1)}
            self._num_live += 1

    def leave(self) -> None:
        """Restore the flags after the last mode has been left."""
        with self._lock:
            self._num_live -= 1
            if self._num_live == 0:
                vars(_python_dispatch).update(self._before)
                set_compiled = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
                if set_compiled is not None:
                    set_compiled(self._before.get("_is_in_any_mode_without_ignore_compile_internals", False))


_TORCH_FLAGS = _TorchFlags()


class CallsSeen(TorchDispatchMode):
    """Tells of each call of an op in a block, before it is computed."""

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[str, tuple[Any, ...]], None]) -> None:
        """see: gets the op's name without its namespace and overload, and the arguments by position."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's constructor has no annotations
        self._see = see

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` work meanwhile: other threads may compile, and torch asks for the whole process."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._see(getattr(getattr(func, "overloadpacket", None), "__name__", ""), args)
        return func(*args, **(kwargs or {}))


@contextmanager
def entered(mode: TorchDispatchMode) -> Iterator[None]:
    """Enter a mode for a block of this thread; threads may enter and leave theirs in any order."""
    _TORCH_FLAGS.enter()
    try:
        with mode:
            yield
    finally:
        _TORCH_FLAGS.leave()


def enter_modes(dispatch: TorchDispatchMode, function: TorchFunctionMode) -> None:
    """Enter both modes on this thread, below the modes that running code has entered.

    Scopes of that code may close before these modes are left, and torch closes a scope by dropping whichever mode is
    on top.
    """
    _TORCH_FLAGS.enter()
    _enter_lowest(dispatch, _python_dispatch, _python_dispatch._get_current_dispatch_mode_stack)
    _enter_lowest(function, overrides, overrides._get_current_function_mode_stack)


def leave_modes(dispatch: TorchDispatchMode, function: TorchFunctionMode) -> None:
    """Remove both modes wherever they are in the stack; those above them stay. Call on the thread that entered them."""
    _leave(function, overrides, overrides._get_current_function_mode_stack)
    _leave(dispatch, _python_dispatch, _python_dispatch._get_current_dispatch_mode_stack)
    _TORCH_FLAGS.leave()


def _enter_lowest(mode: Any, module: Any, stack: Callable[[], Sequence[Any]]) -> None:
    mode.__enter__()
    above = [module._pop_mode() for _ in stack()][1:]
    # The mode of `set_default_device` stays lower: torch looks for it at the very bottom.
    default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if above and above[-1] is default_device:
        module._push_mode(above.pop())
    for other in [mode, *reversed(above)]:
        module._push_mode(other)


def _leave(mode: Any, module: Any, stack: Callable[[], Sequence[Any]]) -> None:
    above = []
    while stack()[-1] is not mode:
        above.append(module._pop_mode())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        module._push_mode(other)
