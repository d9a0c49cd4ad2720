"""Code as a factor of the cache: what a function does, which names it uses, and which packages count as a whole."""

from __future__ import annotations

import dis
import hashlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any

from core.common.passes.identity import bytecode

# Counted by version, or by the text of the whole package: their functions are not followed.
_WHOLE = frozenset({"torch", "torchgen", "functorch", "numpy", "sympy", "core"}) | sys.stdlib_module_names
# Nothing that runs when a model is called, or the same for all classes.
_NEVER_CALLED = frozenset(
    {"__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__"}
    | {"__init_subclass__", "__class_getitem__", "__del__", "__dir__", "__format__", "__sizeof__", "__subclasshook__"}
    | {"__annotate__", "__annotate_func__"}
)
# How classes hold attributes of their instances, whose values are read off the instances.
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_IMPORT = dis.opmap["IMPORT_NAME"]
# Results of `importlib.metadata.packages_distributions`, which takes names from sets: orders differ between processes.
_OF_NO_ORDER = frozenset({"transformers.utils.import_utils:PACKAGE_DISTRIBUTION_MAPPING"})


def is_whole(package: str, more: frozenset[str] = frozenset()) -> bool:
    """Tell whether a package's code is a factor as a whole; `__main__` is a module of the standard library by name."""
    return (package in _WHOLE and package != "__main__") or package in more


def package_of(value: Any) -> str:
    """Return the top package in which a function's code, or a class, was written; wrappers copy other names.

    Modules that log count as one of the standard library's: no result depends on them.
    """
    found = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else value.__module__
    module = str(found or "")
    return "logging" if module.endswith(".logging") else module.partition(".")[0]


def name_of(value: Any) -> str:
    """Return `module:qualified.name` of a function or class."""
    return f"{value.__module__}:{value.__qualname__}"


@lru_cache(maxsize=16384)
def digest_of(code: types.CodeType) -> str:
    """Return a digest of what a code object does, and of how it takes its arguments."""
    parameters = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return hashlib.sha256(repr((bytecode(code)[0], parameters, names)).encode()).hexdigest()[:16]


def unwrapped(member: Any) -> list[types.FunctionType]:
    """Return the functions behind a member of a class: a method, a property, a class method."""
    if isinstance(member, types.FunctionType):
        return [member]
    if isinstance(member, (staticmethod, classmethod)):
        return unwrapped(member.__func__)
    if isinstance(member, property):
        return [each for each in (member.fget, member.fset) if isinstance(each, types.FunctionType)]
    if isinstance(member, cached_property):
        return unwrapped(member.func)
    return unwrapped(member.__wrapped__) if hasattr(member, "__wrapped__") else []


def members(owner: type, more: frozenset[str] = frozenset()) -> dict[str, tuple[type, Any]]:
    """Return what a class has by name, each with the class that it is from; what is followed only.

    Methods that are never called with a model, and those that make one, are left out; of classes that count as a whole,
    all but what is of other packages.
    """
    import torch

    found: dict[str, tuple[type, Any]] = {}
    skipped = _NEVER_CALLED | ({"__init__"} if issubclass(owner, torch.nn.Module) else set())
    for base in reversed(owner.__mro__):
        whole = is_whole(package_of(base), more)
        for name, member in vars(base).items():
            found.pop(name, None)
            if name not in skipped and _is_kept(name, member, whole, more):
                found[name] = (base, member)
    return found


def _is_kept(name: str, member: Any, whole: bool, more: frozenset[str]) -> bool:
    functions = unwrapped(member)
    if whole:  # what somebody has put into a class of torch's
        return any(not is_whole(package_of(each), more) for each in functions)
    return bool(functions) or not (is_dunder(name) or isinstance(member, _DESCRIPTORS))


def plain_members(owner: types.ModuleType | type) -> Iterator[tuple[str, Any]]:
    """Yield what a module or class holds by name that is no code."""
    for base in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        for name, value in vars(base).items():
            code = isinstance(value, (types.ModuleType, type, *_DESCRIPTORS)) or unwrapped(value)
            if not code and not is_dunder(name):
                yield name, value


def items_of(path: str, mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return a mapping's items, not what a subclass makes of them, sorted where their order is one of chance."""
    items = list(dict.items(mapping) if isinstance(mapping, dict) else mapping.items())
    return [(key, sorted(value)) for key, value in sorted(items)] if path in _OF_NO_ORDER else items


def names_of(function: types.FunctionType) -> tuple[str, ...]:
    """Return the names that a function uses, of globals and of attributes alike, and texts that may be such."""
    return _names_in(function.__code__)


@lru_cache(maxsize=16384)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    consts = (const for each in nested(code) for const in each.co_consts)
    texts = {const for const in consts if isinstance(const, str) and const.isidentifier()}  # getattr(x, "name")
    return tuple(sorted(texts.union(bytecode(code)[1])))


def is_dunder(name: str) -> bool:
    """Tell whether Python calls a method of that name by itself."""
    return name.startswith("__") and name.endswith("__")


def callables_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, by name; empty cells (names that are bound later) are left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those within it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested(const)


def is_foreign_code(code: types.CodeType, more: frozenset[str] = frozenset()) -> bool:
    """Tell whether code lies outside of the packages that count as a whole; more: further such packages."""
    if code.co_filename.startswith("<frozen "):  # modules of the standard library
        return False
    path = os.path.abspath(code.co_filename)
    return not any(path.startswith(folder) for folder in _folders(more))


@lru_cache(maxsize=16)
def _folders(more: frozenset[str]) -> tuple[str, ...]:
    """Return the folders of all loaded packages that count as a whole; of the standard library, its modules."""
    found: set[str] = set()
    for package in [name for name in sys.modules if "." not in name and is_whole(name, more)]:
        module = sys.modules[package]
        file = getattr(module, "__file__", None)
        found.update(os.path.join(os.path.abspath(path), "") for path in getattr(module, "__path__", ()))
        if file and not hasattr(module, "__path__"):
            found.add(os.path.abspath(file))
    return tuple(found)


def is_code(value: Any) -> bool:
    """Tell whether a value is called rather than read."""
    return isinstance(value, (types.FunctionType, types.MethodType, partial, type)) or hasattr(value, "__wrapped__")


def imports_of(function: types.FunctionType) -> Iterator[str]:
    """Yield the modules that a function imports when it runs, by their full names."""
    package = str(function.__globals__.get("__package__") or "").split(".")
    for name, level in _imports_in(function.__code__):
        above = package[: len(package) - level + 1] if level else []
        yield ".".join([*above, *([name] if name else [])])


@lru_cache(maxsize=16384)
def _imports_in(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for each in nested(code):
        if _IMPORT not in each.co_code[::2]:
            continue
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opcode == _IMPORT:  # after the level and the names that are taken
                found.append((str(step.argval), int(level.argval or 0)))
    return tuple(found)


def patches(more: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield what somebody has put into torch that models run through unseen: hooks of all modules, functions."""
    import torch
    from torch.nn.modules import module

    for name, value in vars(module).items():
        if name.startswith("_global_") and isinstance(value, dict):
            yield from ((f"{module.__name__}:{name}[{number}]", each) for number, each in enumerate(value.values()))
    for place in (torch, torch.nn.functional, torch.Tensor):
        for name, value in vars(place).items():
            if isinstance(value, types.FunctionType) and not is_whole(package_of(value), more):
                yield f"{place.__name__}:{name}", value


def plain_repr(value: Any, kinds: tuple[type, ...]) -> str:
    """Return the text of the plain value that an instance of a subclass of one of these kinds holds."""
    plain: Any = next(kind for kind in type(value).__mro__ if kind in kinds)
    return str(plain.__repr__(value))
