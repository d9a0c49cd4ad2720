"""The kinds of objects that hold Python state: how to read their content, compare it, and restore it."""

from __future__ import annotations

import collections
import pickle
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from core.compilation.capture.breaks import BreakingForward

MISSING = object()
_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

Content = dict[Any, Any]


class Holder:
    """An object whose content may change, and its former content, by name, key or index."""

    def __init__(
        self,
        label: Callable[[Any], str],
        read: Callable[[], Content],
        write: Callable[[Content], object],
        *,
        ordered: bool = False,
    ) -> None:
        """label: makes the path of an entry. read: returns the present content. write: restores content.

        ordered: whether another order of entries counts as a change.
        """
        self._label, self._read, self._write, self._ordered = label, read, write, ordered
        self._saved = read()

    def children(self) -> list[tuple[str, Any]]:
        """Return the entries with their paths."""
        return [(self._label(key), value) for key, value in self._saved.items()]

    def changes(self) -> Iterator[str]:
        """Yield the paths of entries that were replaced, added or removed."""
        now, saved = self._read(), self._saved
        if now.keys() == saved.keys():
            yield from (self._label(key) for key, value in saved.items() if not _is_same(value, now[key]))
            if self._ordered:
                yield from (self._label(key) for key, other in zip(saved, now, strict=True) if not _is_same(key, other))
        else:
            keys = [*saved, *(key for key in now if key not in saved)]
            yield from (
                self._label(key) for key in keys if not _is_same(saved.get(key, MISSING), now.get(key, MISSING))
            )

    @property
    def changed(self) -> bool:
        """Tell whether anything has changed."""
        return next(self.changes(), None) is not None

    def restore(self) -> None:
        """Restore the object's former content."""
        self._write(self._saved)

    @classmethod
    def of_attributes(cls, path: str, owner: Any) -> Holder:
        """Hold the `__dict__` of an object, without break points that were set there from outside."""

        def read() -> Content:
            return {name: held for name, held in vars(owner).items() if not isinstance(held, BreakingForward)}

        def write(saved: Content) -> None:
            vars(owner).update(saved)
            for name in read().keys() - saved.keys():
                del vars(owner)[name]

        return cls(_attribute_of(path), read, write)

    @classmethod
    def of_items(cls, path: str, space: dict[str, Any], names: Sequence[str]) -> Holder:
        """Hold some of the names of a module."""

        def write(saved: Content) -> None:
            for name in names:
                if name in saved:
                    space[name] = saved[name]
                else:
                    space.pop(name, None)

        return cls(_attribute_of(path), lambda: {name: space[name] for name in names if name in space}, write)

    @classmethod
    def of_names(cls, path: str, owner: Any, names: Sequence[str], *, added: bool = False) -> Holder:
        """Hold slots of an object, or attributes of a class; added: names that come later, too."""

        def read() -> Content:
            known = dict.fromkeys([*names, *(_data_of(owner) if added else ())])
            found = vars(owner) if added else {name: getattr(owner, name, MISSING) for name in known}
            return {name: found[name] for name in known if name in found}

        def write(saved: Content) -> None:
            for name in read().keys() - saved.keys():
                delattr(owner, name)
            for name, value in saved.items():
                if value is not MISSING:
                    setattr(owner, name, value)

        return cls(_attribute_of(path), read, write)

    @classmethod
    def of_cell(cls, name: str, cell: Any) -> Holder:
        """Hold a variable of an enclosing function."""

        def read() -> Content:
            try:
                return {name: cell.cell_contents}
            except ValueError:  # not filled yet
                return {}

        def write(saved: Content) -> None:
            if saved:
                cell.cell_contents = saved[name]
            elif read():
                del cell.cell_contents

        return cls(str, read, write)


def holder_of(path: str, value: Any) -> Holder | None:
    """Return the holder of a container, a random number generator or an array; None for other objects."""
    if isinstance(value, dict):
        return Holder(
            lambda key: f"{path}[{key!r}]", lambda: _items(value), lambda old: _fill(value, old), ordered=True
        )
    if isinstance(value, (list, collections.deque)):
        return Holder(lambda i: f"{path}[{i}]", lambda: dict(enumerate(value)), lambda old: _refill(value, old))
    if isinstance(value, set):
        return Holder(
            lambda item: f"{path}[{item!r}]", lambda: dict.fromkeys(value), lambda old: _refill_set(value, old)
        )
    if isinstance(value, ContextVar):
        # A state that was never set can't be unset again.
        return Holder(
            lambda _: path, lambda: {"": value.get(MISSING)}, lambda old: old[""] is MISSING or value.set(old[""])
        )
    state = _state_of(value)
    if state is None:
        return None
    read, write = state
    return Holder(lambda _: path, lambda: {"": pickle.dumps(read())}, lambda old: write(pickle.loads(old[""])))


def _state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that read and write the internal state of an object."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, bytearray):
        return lambda: bytes(value), lambda old: value.__setitem__(slice(None), old)
    if isinstance(value, array):
        return lambda: value[:], lambda old: value.__setitem__(slice(None), old)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return value.copy, lambda old: numpy.copyto(value, old)
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda old: setattr(bits, "state", old)
    return None


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, _ATOMS) and before == now)


def _attribute_of(path: str) -> Callable[[Any], str]:
    return lambda name: f"{path}.{name}".lstrip(".")


def _data_of(owner: Any) -> Iterator[str]:
    return (name for name in vars(owner) if not name.startswith("__") and not callable(vars(owner)[name]))


def _items(held: dict[Any, Any]) -> Content:
    # An OrderedDict has an order of its own beside that of the dict that it is.
    ordered = isinstance(held, collections.OrderedDict)
    return dict(collections.OrderedDict.items(held) if ordered else dict.items(held))  # type: ignore[arg-type]


def _fill(target: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    kind: Any = collections.OrderedDict if isinstance(target, collections.OrderedDict) else dict
    kind.clear(target)
    for key, value in saved.items():
        kind.__setitem__(target, key, value)


def _refill(target: Any, saved: Mapping[int, Any]) -> None:
    target.clear()
    target.extend(saved.values())


def _refill_set(target: set[Any], saved: Mapping[Any, Any]) -> None:
    target.clear()
    target.update(saved)
