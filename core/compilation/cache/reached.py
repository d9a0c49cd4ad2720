"""Code that calling a model can reach: functions, classes, and what they read by name of their modules and classes."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from core.compilation.cache import code
from core.compilation.cache.facts import Facts

ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, types.EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
)
"""Values that stand for themselves as text."""


class Reached(Facts):
    """Facts of code. code: digests of functions by name. codes: all code objects.

    unloaded: modules that a function imports when it runs, and that were not there yet. What stands in a function or
    class is put into `_waiting`, by path, for who reads values.
    """

    def __init__(self, whole: Iterable[str]) -> None:
        """whole: packages whose source counts as a whole."""
        super().__init__()
        self.code: dict[str, str] = {}
        self.codes: set[types.CodeType] = set()
        self.unloaded: set[str] = set()
        self._whole = frozenset(whole)
        self._waiting: deque[tuple[str, Any]] = deque()
        self._spaces: dict[str, dict[str, tuple[str, Any]]] = {}
        self._names: set[str] = {"forward"}  # by which torch calls a module
        self._classes: dict[type, dict[str, tuple[type, Any]]] = {}
        self._texts: set[str] = set()
        self._asks_environment = False

    def covers(self, function: types.CodeType) -> bool:
        """Tell whether code that a trace ran through is counted here."""
        return function in self.codes

    def _add_named(self) -> None:
        """Add members by name: what any code here calls by a name that a class has, or a module that is a value."""
        for known in self._classes.values():
            for name in [name for name, held in known.items() if self._is_reached(name, *held)]:
                base, member = known.pop(name)
                self._add_member(f"{self.own_name(base)}.{name}", member)
        for space in self._spaces.values():
            for name in sorted(self._names & space.keys()):
                self._waiting.append(space.pop(name))

    def _add_class(self, owner: type) -> None:
        if owner in self._classes:
            return
        self._classes[owner] = code.members(owner, self._whole)
        if not code.is_whole(code.package_of(owner), self._whole):
            self.note(f"{self.own_name(owner)}.__mro__", ", ".join(map(self.own_name, owner.__mro__[1:-1])))

    def _add_function(self, name: str, function: types.FunctionType) -> None:
        self.codes.update(code.nested(function.__code__))
        if code.is_whole(code.package_of(function), self._whole):
            # Wrappers of torch and of the standard library: what they wrap, and with what, may be anybody's.
            inner = [(f"{name}.{key}", held) for key, held in code.callables_in(function)]
            self._waiting += [(at, held) for at, held in inner if type(held) in ATOMS or _is_followed(held)]
            return
        self.code[name] = code.digest_of(function.__code__)
        names = code.names_of(function)
        self._names.update(names)
        self._texts.update(names)
        self._asks_environment = self._asks_environment or not {"environ", "getenv"}.isdisjoint(names)
        parts = [*code.callables_in(function), *vars(function).items()]
        parts += [("defaults", function.__defaults__), ("kwdefaults", function.__kwdefaults__)]
        self._waiting += [(f"{name}.{key}", held) for key, held in parts if held is not None]
        for _, held in code.callables_in(function):
            if isinstance(held, types.ModuleType):
                self._add_attributes(held, frozenset(names), set())
        self._add_globals(function)

    def _add_globals(self, function: types.FunctionType) -> None:
        space = function.__globals__
        names = code.names_of(function)
        home = self.own_name(space, str(space.get("__name__")))
        for name in [name for name in names if name in space]:
            value = space[name]
            if isinstance(value, types.ModuleType):
                self._add_attributes(value, frozenset(names), set())
            else:
                self._waiting.append((f"{home}:{name}", value))
        for name in code.imports_of(function):
            module: Any = sys.modules.get(name)
            if isinstance(module, types.ModuleType):
                self._add_attributes(module, frozenset(names), set())
            elif module is not None:  # a stand-in that loads the module when it is used: that would be done here
                self.note(f"module {name}", code.name_of(type(module)))
            elif not code.is_whole(name.partition(".")[0], self._whole):
                self.unloaded.add(name)

    def _add_attributes(self, module: types.ModuleType, names: frozenset[str], seen: set[str]) -> None:
        """Note what code may read from a module: all of its names that the code uses, modules in it included."""
        if module.__name__ in seen:
            return
        seen.add(module.__name__)
        whole = code.is_whole(module.__name__.partition(".")[0], self._whole)
        home = self.own_name(vars(module), module.__name__)
        for name in sorted((names | {"__getattr__"}) & vars(module).keys()):
            value, path = vars(module)[name], f"{home}:{name}"
            if isinstance(value, types.ModuleType):
                self._add_attributes(value, names, seen)
            elif not whole:
                self._waiting.append((path, value))
            elif isinstance(value, types.FunctionType) and not code.is_whole(code.package_of(value), self._whole):
                self._waiting.append((path, value))  # somebody's own in the place of one of torch's
            elif getattr(value, "__name__", name) != name:
                self.note(path, str(value.__name__))  # another name for it, or another function in its place

    def _add_values(self, home: str, held: Iterable[tuple[str, Any]]) -> None:
        """Keep what may be read from a module or class that stands as a value; code behind it is not followed."""
        self._spaces.setdefault(home, {name: (f"{home}{name}", value) for name, value in held})

    def _is_reached(self, name: str, base: type, member: Any) -> bool:
        """Tell whether a member counts: by name, as a plain value (its name may be composed), or put into torch."""
        if name in self._names or code.is_dunder(name) or type(member) in ATOMS:
            return True
        return code.is_whole(code.package_of(base), self._whole)

    def _add_member(self, path: str, member: Any) -> None:
        if isinstance(member, type):  # such as the class of a model's configuration: what makes one is not called here
            self.note(path, f"class {self.own_name(member)}")
            held = [(name, value) for name, value in code.plain_members(member) if type(value) in ATOMS]
            self._add_values(f"{self.own_name(member)}.", held)
            return
        self._waiting += [(path, each) for each in code.unwrapped(member) or [member]]


def _is_followed(value: Any) -> bool:
    return code.is_code(value) or (hasattr(value, "__dict__") and not isinstance(value, types.ModuleType))
