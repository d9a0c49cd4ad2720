"""The Python values that a trace read: their expressions, and their values in this process as text.

The expressions are Dynamo's, over two names: `phases`, the callables of the program, and `modules`, those of Python.
They are interpreted here, never handed to `eval`.
"""

from __future__ import annotations

import ast
import json
import re
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from core.compilation.cache.differences import shown
from core.compilation.cache.literals import encode
from core.compilation.cache.lookups import ABSENT, LOOKUPS, Fact, module_of
from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.cache.values import ATOMS, Texts, name_of, tensor_text
from core.compilation.capture.breaks import modules_of
from core.compilation.trace.reads import UNKNOWN, Reads

_MODEL = "L['model']"
_GIVEN = re.compile(r"L\['(inputs|constants)'\]|\.environ\._data\b")
"""Sources that other factors cover: inputs and guards by the request, the environment by variable."""
_HOOKS = re.compile(r"(.*)\.\w*_hooks\w*")
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_VALUES = (*ATOMS, tuple, frozenset)
"""Types whose equal values may or may not be one object, by chance."""


def expressions_of(reads: Reads, phase: str, *, hands_through: bool) -> Iterator[str]:
    """Yield the expressions of everything that a trace read; raise `Uncacheable` for a value without one.

    hands_through: whether the model returns constants, which Dynamo reads without a guard.
    """
    for what in reads.unknown:
        raise Uncacheable(f"the model reads {what}")
    sources = [*reads.sources, *(reads.handed_through if hands_through else ())]
    yield from (_placed(each, phase) for each in sources if not _GIVEN.search(each))
    for source, name, own in reads.attributes:
        if not _GIVEN.search(source):
            yield f"{'own' if own else 'hasattr'}({_placed(source, phase)}, {name!r})"
    yield from (f"builtin({module!r}, {name!r})" for module, name in reads.builtins)
    yield from (f"environment({name!r})" for name in reads.environment)
    for call in reads.calls:
        if not getattr(call.function, "__module__", None) or not hasattr(call.function, "__qualname__"):
            raise Uncacheable(f"the model calls {call.function!r} while it is traced, to which no name leads")
        given = json.dumps([encode(call.args), encode(dict(call.kwargs))])
        answer = "" if call.answer is UNKNOWN else f", {json.dumps(encode(call.answer))!r}"
        yield f"call({name_of(call.function)!r}, {given!r}{answer})"


def content_of(path: str) -> str:
    """Return the expression for the content of the tensor at a path."""
    return f"content({path})"


def content_path(expression: str) -> str:
    """Return the path of the tensor whose content an expression names; "" for any other expression."""
    found = re.fullmatch(r"content\((.+)\)", expression)
    return found[1] if found else ""


def _placed(source: str, phase: str) -> str:
    found = source.replace(_MODEL, f"phases[{phase!r}]")
    found = re.sub(r"\bM\[", "modules[", found)
    if re.search(r"\b[LG]\[", found):
        raise Uncacheable(f"the model reads {source}, to which no name leads")
    return found


_STEP = r"\.[A-Za-z_]\w*|\[-?\d+\]|\['[^'\\]*'\]"
_FROM_THE_START = rf"(?:phases|modules)\['[^'\\]*'\](?:{_STEP})*"
_CHAIN = re.compile(_FROM_THE_START, re.ASCII)
_OF_A_CHAIN = re.compile(rf"(type|own|hasattr)\(({_FROM_THE_START})(?:, '([^'\\]*)')?\)", re.ASCII)
_LAST_STEP = re.compile(r"(.+)(?:\.([A-Za-z_]\w*)|\[(-?\d+)\]|\['([^'\\]*)'\])", re.ASCII)


class Reading:
    """One reading of live values. Keeps every object that it has met alive."""

    def __init__(self, phases: Mapping[str, Any], names: frozenset[str], layouts: Layouts) -> None:
        """phases: the callables of the program. names: see `Texts`. layouts: of tensors that passes may have moved."""
        self.texts = Texts(names)
        #: Texts by expression.
        self.values: dict[str, str] = {}
        #: Objects met so far, by expression.
        self.tensors: dict[str, Tensor] = {}
        self._phases = phases
        self._layouts = layouts
        self._first: dict[int, tuple[Any, str]] = {}
        self._memory: dict[tuple[str, int], str] = {}
        self._alike: dict[str, list[Any]] = {}
        self._beginnings: dict[str, Any] = {}

    def path_of(self, tensor: Tensor) -> str | None:
        """Return the first expression that led to a tensor object; None where none did."""
        value, expression = self._first.get(id(tensor), (None, ""))
        return expression if value is tensor else None

    def read(self, expressions: Iterable[str], *, strict: bool = True) -> dict[str, str]:
        """Read expressions in a fixed order, so that equal values have equal texts; return all texts so far.

        Raises `Uncacheable` for a value without a text; where not strict, its text is the reason why it has none.
        """
        for each in sorted(set(expressions)):
            try:
                self.values[each] = self._text(each)
            except Uncacheable as reason:
                if strict:
                    raise
                self.values[each] = f"({reason})"
        return self.values

    def _text(self, expression: str) -> str:
        """Return the value of an expression as text, and the earlier expression of the same object, if any.

        Raises `Uncacheable` for a value without a text; a missing value is `ABSENT`.
        """
        try:
            value = self._at(expression)
        except Uncacheable:
            raise
        except Exception:  # whatever a lookup raises: the trace found a value there, or will find none either
            return ABSENT
        if isinstance(value, Fact):
            return value
        if isinstance(value, dict) and (hooks := _HOOKS.fullmatch(expression)):
            return self.texts.of(_ranked(value, self._at(hooks[1])))
        if isinstance(value, Tensor):
            self.tensors[expression] = value
        try:
            text = self.texts.of(value)
        except Uncacheable as reason:
            raise Uncacheable(f"{shown(expression)} {reason}") from None
        if isinstance(value, Tensor):
            text = self._placed(value, expression)
        return text if type(value) in _VALUES else self._told_apart(value, text, expression)

    def _placed(self, tensor: Tensor, expression: str) -> str:
        """Return the text of a tensor as the model held it at first, and whose memory it shares."""
        text, memory = self._layouts.of(tensor)
        first = self._memory.setdefault(memory, expression)
        return text if first == expression else f"{text}, in the memory of {first}"

    def _told_apart(self, value: Any, text: str, expression: str) -> str:
        """Return the text with which object it is of: of code, among those of the same text, else where it was met."""
        first = self._first.setdefault(id(value), (value, expression))[1]
        if not isinstance(value, _CODE):
            return text if first == expression else f"= {first}"
        same = self._alike.setdefault(text, [])
        if not any(each is value for each in same):
            same.append(value)
        number = next(number for number, each in enumerate(same) if each is value)
        return f"{text} #{number + 1}" if number else text

    def _at(self, expression: str) -> Any:
        """Return the value of an expression, parsed only where it is no chain of attributes and items, as most are."""
        if _CHAIN.fullmatch(expression):
            return self._reached(expression)
        if asked := _OF_A_CHAIN.fullmatch(expression):
            lookup, chain, name = asked.groups()
            return LOOKUPS[lookup](self._reached(chain), *(() if name is None else (name,)))
        return self._value(ast.parse(expression, mode="eval").body)

    def _reached(self, chain: str) -> Any:
        """Return the value at the end of a chain. Thousands begin alike: each beginning is looked up once."""
        before, name, index, key = _LAST_STEP.fullmatch(chain).groups()  # type: ignore[union-attr]
        if before == "phases":
            return self._phases[key]
        if before == "modules":
            return module_of(key)
        if before not in self._beginnings:
            self._beginnings[before] = self._reached(before)
        owner = self._beginnings[before]
        if name is not None:
            return getattr(owner, name)
        return owner[key if index is None else int(index)]

    def _value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Attribute():
                return getattr(self._value(node.value), node.attr)
            case ast.Subscript(value=ast.Name(id="phases"), slice=ast.Constant(value=name)):
                return self._phases[str(name)]
            case ast.Subscript(value=ast.Name(id="modules"), slice=ast.Constant(value=name)):
                return module_of(str(name))
            case ast.Subscript():
                return self._value(node.value)[self._value(node.slice)]
            case ast.Tuple():
                return tuple(map(self._value, node.elts))
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand)
            case ast.Call(keywords=[]):
                return self._called(ast.unparse(node.func), node)
        raise Uncacheable(f"the model reads {ast.unparse(node)}, which can't be read again")

    def _called(self, name: str, node: ast.Call) -> Any:
        if name in LOOKUPS:
            return LOOKUPS[name](*map(self._value, node.args))
        if not node.args:
            held = self._value(node.func)
            if isinstance(held, weakref.ref):
                return held()
        raise Uncacheable(f"the model reads {ast.unparse(node)}, which can't be read again")


def _ranked(hooks: Mapping[Any, Any], owner: Any) -> dict[int, Any]:
    """Return hooks numbered within their owner: their own ids count all hooks of the process."""
    held = [each for name, each in vars(owner).items() if "hooks" in name and isinstance(each, dict)]
    ranks = {number: rank for rank, number in enumerate(sorted({number for each in held for number in each}))}
    return {ranks[number]: hook for number, hook in hooks.items()}


class Layouts:
    """How the tensors of a program's modules lie in memory before passes join some of them."""

    def __init__(self, phases: Mapping[str, Any]) -> None:
        self._known: dict[int, tuple[Tensor, str, int]] = {}
        for model in phases.values():
            for module in modules_of(model).values():
                held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
                for value in held:
                    if isinstance(value, Tensor) and value.layout == torch.strided:
                        self._known[id(value)] = (value, tensor_text(value), value.untyped_storage()._cdata)

    def of(self, tensor: Tensor) -> tuple[str, tuple[str, int]]:
        """Return the text of a tensor, and a key of its memory."""
        known, text, memory = self._known.get(id(tensor), (None, "", 0))
        if known is tensor:
            return text, ("then", memory)
        return tensor_text(tensor), ("now", tensor.untyped_storage()._cdata)
