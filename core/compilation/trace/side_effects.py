"""The Python state that a trace changes, as Dynamo knows it; the one module that reads Dynamo's own bookkeeping.

Dynamo executes a forward symbolically. It records assignments to existing objects (attributes, items, globals,
variables of enclosing functions, iterators, random number generators) in `OutputGraph.side_effects`, and would apply
them to the real objects after the graph has run. Traces are made without that (`SETTINGS`), so a trace changes nothing.
All of this is private to torch: written against 2.11 and 2.13, and torch 2.8 as far as it goes: there a trace would
change the objects, so that nothing is a counter, and Dynamo does not note the lines.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from core.common.node_meta import value_of
from core.common.passes.effects import written_args

SETTINGS: Mapping[str, Any] = {"replay_side_effects": False, "side_effect_replay_policy": "info"}
"""Settings of Dynamo under which a trace leaves Python's objects alone, and notes where each would be changed."""
LEAVES_STATE = hasattr(torch._dynamo.config, "replay_side_effects")
"""Whether this torch can trace a change of Python's state without making it."""
_MISSING = object()
_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_SHARED = (type, types.ModuleType)
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class SideEffect:
    """Something in Python that a call of the model changes, and a replayed graph would not."""

    #: how the model reaches it, such as `layers.0.cache.length`
    place: str
    #: what kind of object is changed, such as "attribute of a Cache"
    kind: str
    #: `File "model.py", line 12: self.length += 1`; empty where Dynamo did not note it
    line: str = ""
    #: of an integer attribute of an object, which may be a counter: owner, attribute, and Dynamo's name for it
    number: tuple[Any, str, str] | None = None
    #: the attribute's new value, an expression of symbols; None for a constant
    after: Any = None


def side_effects(model: Callable[..., Any], tensors: Mapping[fx.Node, Any]) -> list[SideEffect]:
    """Return what the forward that Dynamo has just traced changes in Python; called by the backend of the trace.

    An assignment of the same value does not count, and neither does one of a tensor to its own place after the graph
    wrote it. tensors: what each placeholder of the graph is given.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects: Any = InstructionTranslator.current_tx().output.side_effects
    return [*_Changes(effects, model, tensors).found(), *_drawn_or_written(model, tensors)]


def _drawn_or_written(model: Callable[..., Any], tensors: Mapping[fx.Node, Any]) -> Iterator[SideEffect]:
    """Yield the inputs of a graph that Python makes at each call: random numbers, and arrays that the graph writes."""
    from torch._dynamo.source import NumpyTensorSource, RandomValueSource

    for node in tensors:
        source = getattr(node.meta.get("grapharg"), "source", None)
        if isinstance(source, RandomValueSource):
            yield SideEffect("the state of a random generator of Python", "random number", _line(node.stack_trace))
        elif isinstance(source, NumpyTensorSource) and value_of(node)._version > 0:
            line = next((_line(user.stack_trace) for user in node.users if node in written_args(user)), "")
            yield SideEffect(_readable(name_of(source.base), model), "content of a numpy array", line)


def name_of(source: Any) -> str:
    """Return Dynamo's expression for a source or guard, which some torch has as a method."""
    return str(source.name() if callable(source.name) else source.name)


def counter_settings(sources: Iterable[str]) -> Any:
    """Return a context in which Dynamo traces the integers of these names as symbols."""
    config: Any = torch.compiler.config
    return config.patch(dynamic_sources=",".join(f"{re.escape(source)}$" for source in sources))


class _Changes:
    """Compares the content of objects after a call, according to Dynamo, with their present content."""

    def __init__(self, effects: Any, model: Callable[..., Any], tensors: Mapping[fx.Node, Any]) -> None:
        self._effects = effects
        self._model = model
        self._tensors = tensors
        objects = {id(item): item for item in effects.keepalive}
        self._objects = {variable: objects.get(key, _MISSING) for key, variable in effects.id_to_variable.items()}

    def found(self) -> Iterator[SideEffect]:
        """Yield the changes, in the order in which Dynamo met the objects."""
        for variable, item in self._objects.items():
            if not type(variable.mutation_type).__name__.endswith("MutationExisting"):
                continue  # made by the forward itself, or immutable
            if self._effects.is_modified(variable):
                yield from self._changes(variable, item)

    def _changes(self, variable: Any, item: Any) -> Iterator[SideEffect]:
        place = _readable(name_of(variable.source), self._model)
        attributes = self._effects.store_attr_mutations.get(variable, {})
        for name, value in attributes.items():
            now = _attribute(item, name)
            if not self._is_same(now, value):
                effect = self._effect(variable, *_named(variable, place, name, item))
                if type(now) is int and effect.kind.startswith("attribute of a ") and not isinstance(item, _SHARED):
                    number = item, name, f"{name_of(variable.source)}.{name}"
                    symbolic = getattr(value, "sym_num", None)
                    after = symbolic.node.expr if isinstance(symbolic, torch.SymInt) else None
                    effect = replace(effect, number=number, after=after)
                yield effect
        content = next((getattr(variable, name, None) for name in _CONTENTS if getattr(variable, name, None)), None)
        if content is not None and self._effects.is_modified(content):
            yield self._effect(content, place, f"content of a {type(item).__name__}")
        elif not attributes:
            yield from (self._effect(variable, *where) for where in self._content(variable, place, item))

    def _content(self, variable: Any, place: str, item: Any) -> Iterator[tuple[str, str]]:
        """Yield what differs in a list or dict; any other object whose content was changed differs."""
        kind = f"content of a {type(item).__name__}"
        if type(item) is list and len(item) == len(variable.items):
            pairs = enumerate(zip(item, variable.items, strict=True))
            yield from ((f"{place}[{i}]", kind) for i, (old, new) in pairs if not self._is_same(old, new))
        elif type(item) is dict and all(key.vt.is_python_constant() for key in variable.items):
            values = {key.vt.as_python_constant(): value for key, value in variable.items.items()}
            for key in [*item, *(key for key in values if key not in item)]:
                if key not in values or not self._is_same(item.get(key, _MISSING), values[key]):
                    yield _item_of_dict(place, key), kind
            if item.keys() == values.keys() and [*item] != [*values]:
                yield place, f"order of a {type(item).__name__}"
        else:
            yield place, kind

    def _is_same(self, now: Any, value: Any) -> bool:
        """Tell whether what Dynamo holds for a value is the object that is there now, or a constant equal to it."""
        lazy = getattr(value, "_cache", None)
        if lazy is not None and lazy.vt is None:
            return lazy.value is now
        value = value.realize()
        if hasattr(value, "sym_num"):
            return False  # asking for its value would make it a constant
        if now is _MISSING:
            return type(value).__name__ == "DeletedVariable"  # made by the forward, and freed at its end
        if self._objects.get(value, _MISSING) is now:
            return True
        if isinstance(now, torch.Tensor):
            return self._tensor_behind(value) is now
        if type(now) is tuple and type(getattr(value, "items", None)) is list:
            return len(now) == len(value.items) and all(map(self._is_same, now, value.items))
        if not value.is_python_constant():
            return bool(getattr(value, "value", _MISSING) is now)
        constant = value.as_python_constant()
        return constant is now or (type(now) is type(constant) and isinstance(now, _ATOMS) and now == constant)

    def _tensor_behind(self, value: Any) -> Any:
        """Return the tensor that an input of the graph is, itself or written in place; None for a computed one."""
        fake = value_of(value.as_proxy().node) if hasattr(value, "proxy") else None
        # The result of a write in place is the very fake tensor that was written.
        behind = (held for node, held in self._tensors.items() if value_of(node) is fake)
        return None if fake is None else next(behind, None)

    def _effect(self, variable: Any, place: str, kind: str) -> SideEffect:
        stacks: Sequence[Any] = getattr(self._effects, "mutation_user_stacks", {}).get(variable, ())
        frames = [frame for stack in reversed(stacks) for frame in reversed(stack)]
        own = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
        lines = [f'File "{frame.filename}", line {frame.lineno}: {frame.line}' for frame in (own or frames)[:1]]
        return SideEffect(place, kind, "".join(lines))


_CONTENTS = ("_base_vt", "_dict_vt", "_list_vt")
"""Where Dynamo keeps the content of an object whose class derives from dict or list: torch 2.13, and 2.11."""


def _attribute(item: Any, name: str) -> Any:
    """Return an attribute as it is now, or `_MISSING`."""
    try:
        return getattr(item, name)
    except (AttributeError, ValueError):  # ValueError: a cell that is not filled yet
        return _MISSING


def _named(variable: Any, place: str, name: str, item: Any) -> tuple[str, str]:
    """Return place and kind of an attribute that was assigned."""
    kind = type(variable).__name__
    if kind == "NewGlobalVariable":
        return name, "global variable"
    if kind == "CellVariable":
        return getattr(variable, "local_name", None) or place, "variable of an enclosing function"
    owner = f"class {item.__name__}" if isinstance(item, type) else type(item).__name__
    return f"{place}.{name}".lstrip("."), f"attribute of a {owner}"


def _item_of_dict(place: str, key: object) -> str:
    """Return the path of an entry; `_buffers["state"]` is the attribute `state` to whoever wrote the model."""
    home, _, last = place.rpartition(".")
    if last in ("_buffers", "_parameters", "_modules"):
        return f"{home}.{key}".lstrip(".")
    return f"{place}[{key!r}]"


def _readable(name: str, model: Callable[..., Any]) -> str:
    """Return the name that Dynamo has for an object as the model's author would write it."""
    free = getattr(getattr(model, "__code__", None), "co_freevars", ())
    closed = re.compile(r"^L\['model'\]\.__closure__\[(\d+)\](\.cell_contents)?")
    name = closed.sub(lambda found: free[int(found[1])] if int(found[1]) < len(free) else found[0], name)
    name = re.sub(r"G\['__import_([^']*)'\]", lambda found: found[1].replace("_dot_", "."), name)
    name = re.sub(r"^L\['model'\]\.?|^(?:___\w+\()?G\['([^']*)'\]", lambda found: found[1] or "", name)
    name = re.sub(r"\.__dict__\['(\w+)'\]|^__dict__\['(\w+)'\]", lambda found: f".{found[1] or found[2]}", name)
    return re.sub(r"\b_(?:modules|parameters|buffers)\['(\w+)'\]", r"\1", name).strip(".")


def _line(trace: str | None) -> str:
    """Return the innermost place of a node's stack as one line."""
    places = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', trace or "")
    return 'File "{}", line {}: {}'.format(*places[-1]) if places else ""
