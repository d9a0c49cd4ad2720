"""The Python values that a trace read: the compile cache reads all of them again before it reuses a stored graph.

Dynamo names each value by an expression over the traced function's locals (`L`) and globals (`G`). Its guards leave out
values that it assumes fixed: builtins, absent environment variables, results of functions that it calls while tracing,
constants that are handed through. So these are recorded where Dynamo meets them.
"""

from __future__ import annotations

import builtins
import functools
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from core.compilation.trace.side_effects import name_of

_GLOBAL = re.compile(r"\bG\['([^']+)'\]")
_PURE = frozenset({"builtins", "_operator", "operator", "math", "cmath", "itertools", "_functools", "functools"})
"""Modules of functions that depend on their arguments alone."""
_OF_THE_TRACE = ("torch.compiler", "torch._dynamo", "torch.jit", "torch.fx", "torch._C._dynamo")
"""Modules of functions that tell whether something is traced, and answer so in every trace."""
_OF_THE_PROCESS = frozenset({"id", "hash", "dir"})
"""Builtins whose answers another process does not give."""


UNKNOWN = object()
"""Stands for an answer that is not kept, since it follows from values that are compared."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function that Dynamo called while tracing, with constants, and put the constant result in its place."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: what it returned in the trace, of a function that is declared constant: it need not answer so outside of one
    answer: Any = UNKNOWN


@dataclass(slots=True)
class Reads:
    """What one trace read."""

    #: Expressions over `L`, the locals of the traced step, and `M`, modules by name; in the order of the reads.
    sources: dict[str, None] = field(default_factory=dict)
    #: Expressions of constants that may stand in the model's output and nowhere else.
    handed_through: dict[str, None] = field(default_factory=dict)
    #: `(expression, attribute, whether only the object's own attributes were asked)` of attributes asked for.
    attributes: dict[tuple[str, str, bool], None] = field(default_factory=dict)
    #: `(module, name)` of names that were looked up in a module and found among the builtins.
    builtins: dict[tuple[str, str], None] = field(default_factory=dict)
    #: Names of environment variables.
    environment: dict[str, None] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    #: Descriptions of values that were read and can't be read again.
    unknown: dict[str, None] = field(default_factory=dict)
    _guards: tuple[Any, ...] = ()
    #: What Dynamo names results that it took for constants, of calls that are noted.
    _answers: set[str] = field(default_factory=set)

    def taking_guards(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """Return a Dynamo backend that keeps the guards, which Dynamo frees when it is done."""

        def called(graph: Any, examples: Any) -> Any:
            context: Any = torch._guards.TracingContext.get()
            self._guards = tuple(context.guards_context.dynamo_guards)
            if not _WHOLE_ENVIRONMENT.isdisjoint(torch._guards.TracingContext.get_traced_code() or ()):
                self.refuse("the environment as a whole")
            return backend(graph, examples)

        return called

    def settle(self, space: Mapping[str, Any]) -> None:
        """Take in the guards of a trace that is done. space: the globals of the traced function."""
        for guard in self._guards:
            name = name_of(guard)
            if not name:  # torch's global state, which is a separate factor of the cache
                continue
            kind, attribute = _kind(guard.create_fn), _attribute(guard.create_fn)
            if kind == "HASATTR" and attribute is None:  # torch 2.11 guards the attribute, which need not be there
                self._note_asked(guard.originating_source)
                continue
            self.sources.setdefault(name)
            if kind in ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT") and isinstance(attribute, str):
                self.attributes.setdefault((name, attribute, kind != "HASATTR"))
        self._guards = ()
        for named in (self.sources, self.handed_through):
            for name in self._answers:
                named.pop(name, None)
        self.sources = {_with_modules(name, space): None for name in self.sources}
        self.handed_through = {_with_modules(name, space): None for name in self.handed_through}
        self.attributes = {(_with_modules(name, space), asked, own): None for name, asked, own in self.attributes}

    def _note_asked(self, source: Any) -> None:
        """Note that an object was asked for an attribute. source: of the attribute."""
        while not hasattr(source, "member"):  # of a module, within what says so
            source = source.base
        self.attributes.setdefault((name_of(source.base), str(source.member), False))

    def note_source(self, builder: Any) -> None:
        """Note a value that Dynamo makes a variable of."""
        self.sources.setdefault(name_of(builder.source))

    def note_builtin(self, frame: Any, name: str) -> None:
        """Note a name that is no global of the frame that asks for it."""
        self.builtins.setdefault((str(frame.f_globals.get("__name__")), name))

    def note_call(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call where its result is a constant that does not follow from its arguments alone."""
        value = _callee(function)
        self._note_attribute(value, args)
        inlined = hasattr(function, "get_code")
        if inlined and isinstance(value, types.FunctionType) and value.__code__ in _ENCODERS:
            self.environment.update(dict.fromkeys(map(os.fsdecode, _constants(args) or ())))
        if inlined or _is_declared(value):
            return
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            return  # the result follows from its arguments and from an object whose read is recorded
        home = str(getattr(value, "__module__", None) or getattr(value, "__objclass__", object).__module__)
        if home == "builtins" and getattr(value, "__name__", "") in _OF_THE_PROCESS:
            self.refuse(f"{value.__name__}(), which each process answers in its own way")
        if home in _PURE or home.startswith(_OF_THE_TRACE) or isinstance(value, type) or not callable(value):
            return
        constants, named = _constants(args), _constants(kwargs.values())
        if constants is None or named is None or _constants((result,)) is None:
            return
        self.calls.append(Call(value, constants, dict(zip(kwargs, named, strict=True))))

    def note_declared(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call of a function that is declared constant: Dynamo makes it, whatever led to it."""
        constants, named = _constants(args), _constants(kwargs.values())
        if constants is None or named is None or not result.is_python_constant() or not _is_found(function):
            self.refuse(f"what {function.__qualname__} returns, which is declared to be constant")
            return
        again = dict(zip(kwargs, named, strict=True))
        self.calls.append(Call(function, constants, again, result.as_python_constant()))
        if result.source is not None:  # a name of Dynamo's own for the result
            self._answers.add(name_of(result.source))

    def _note_attribute(self, value: Any, args: Any) -> None:
        """Note what is asked of objects whose attributes Dynamo does not guard: modules of Python."""
        if value is hasattr or (value is getattr and len(args) == 3):
            source, names = args[0].realize().source, _constants(args[1:2])
            if source is not None and names is not None:
                self.attributes.setdefault((name_of(source), str(names[0]), False))

    def refuse(self, what: str) -> None:
        """Note that the trace read what can't be read again."""
        self.unknown.setdefault(what)


@contextmanager
def recording() -> Iterator[Reads]:
    """Make Dynamo report what it reads inside this context; one trace of the process at a time."""
    from unittest.mock import patch

    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import builder, functions, lazy, nn_module

    reads, frame = Reads(), symbolic_convert.InstructionTranslatorBase

    def noted(note: Callable[..., None], *given: Any) -> None:
        try:
            note(*given)
        except Exception as error:  # a failure here costs the cache, not the trace
            reads.refuse(f"what can't be noted ({type(error).__name__}: {error})")

    def build(original: Callable[..., Any], self: Any, value: Any) -> Any:
        noted(reads.note_source, self)
        return original(self, value)

    def load_builtin(original: Callable[..., Any], self: Any, name: str) -> Any:
        noted(reads.note_builtin, self, name)
        return original(self, name)

    def call(original: Callable[..., Any], self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        found = original(self, fn, args, kwargs)
        noted(reads.note_call, fn.realize(), args, kwargs, self.stack[-1])
        return found

    def declared(original: Callable[..., Any], tx: Any, fn: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = original(tx, fn, name, args, kwargs)
        if _is_declared(fn):
            noted(reads.note_declared, fn, args, kwargs, found)
        return found

    def hand_through(original: Callable[..., Any], value: Any, source: Any, **options: Any) -> Any:
        reads.handed_through.setdefault(name_of(source))
        return original(value, source, **options)

    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (builder.VariableBuilder, "__call__", build),
        (frame, "load_builtin_from_argval", load_builtin),
        (frame, "call_function", call),
        (functions, "invoke_and_store_as_constant", declared),
        (nn_module, "invoke_and_store_as_constant", declared),
    ]
    kind: Any = getattr(lazy, "LazyConstantVariable", None)  # torch 2.11 guards such constants at once
    wrapped += [(kind, "create", hand_through)] if kind is not None else []
    with ExitStack() as stack:
        for owner, name, wrapper in wrapped:
            stack.enter_context(patch.object(owner, name, _around(vars(owner)[name], wrapper)))
        yield reads


def _around(original: Any, wrapper: Callable[..., Any]) -> Any:
    plain = getattr(original, "__func__", original)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(plain, *args, **kwargs)

    return staticmethod(wrapped) if isinstance(original, staticmethod) else wrapped


_ENCODERS = frozenset(
    each.encodekey.__code__ for each in (os.environ, getattr(os, "environb", os.environ)) if hasattr(each, "encodekey")
)
"""What `os.environ` calls with the name of each variable that it is asked for."""
_WHOLE_ENVIRONMENT = frozenset(
    member.__code__
    for name, member in vars(type(os.environ)).items()
    if isinstance(member, types.FunctionType) and name != "__getitem__"
)
"""What of `os.environ` looks at all variables, or sets some."""


def _constants(values: Any) -> tuple[Any, ...] | None:
    """Return the values of Dynamo's variables; None where one of them is no constant."""
    if not all(each.is_python_constant() for each in values):
        return None
    return tuple(each.as_python_constant() for each in values)


def _is_declared(function: Any) -> bool:
    """Return whether a function's results are constants to Dynamo, by `torch._dynamo.assume_constant_result`."""
    return bool(getattr(function, "_dynamo_marked_constant", False))


def _is_found(function: Any) -> bool:
    """Return whether the name of a function of a module leads to it, or to a cache of its results."""
    found = getattr(sys.modules.get(function.__module__), function.__qualname__, None)
    return (found.__wrapped__ if isinstance(found, functools._lru_cache_wrapper) else found) is function


def _callee(function: Any) -> Any:
    """Return what a variable of Dynamo calls; None for what exists while tracing only."""
    for name in ("fn", "value"):
        if getattr(function, name, None) is not None:
            return getattr(function, name)
    return function.as_python_constant() if function.is_python_constant() else None


def _kind(create_fn: Any) -> str:
    """Return the name of what makes a guard's check; what belongs to one guard may be bound to it."""
    return str(getattr(create_fn, "func", create_fn).__name__)


def _attribute(create: Any) -> Any:
    """Return the attribute that a guard asks for, None where it asks for none."""
    given = getattr(create, "keywords", {})
    return given.get("attr", next(iter(getattr(create, "args", ())), None))


def _with_modules(name: str, space: Mapping[str, Any]) -> str:
    """Return an expression with the globals that Dynamo made for it replaced by what they stand for."""

    def replaced(match: re.Match[str]) -> str:
        value = space.get(match[1])
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            return f"M[{value.__name__!r}]"
        return "M['builtins'].__dict__" if value is vars(builtins) else match[0]

    return _GLOBAL.sub(replaced, name)
