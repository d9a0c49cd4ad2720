"""Everything that calling a model can depend on, read off the callables: values, tensors and code, by path.

A trace is a function of what its Python reads. So all is collected that can be read: attributes, containers, closures
and globals by value; tensors by what a graph sees of them, not by content; functions by what they do, hooks and those
put on single modules included. What can't be read is a reason not to cache, never left out.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import logging
import os
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.cache import code

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, types.EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
)
_OPAQUE = (
    *(logging.Logger, logging.LoggerAdapter, logging.Handler),
    *(type(threading.Lock()), type(threading.RLock()), threading.local),
)
"""State that no result depends on."""
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
_BUILTINS = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
# Where a model was read from, and a hash that each process makes anew: these say nothing of what it is.
_ORIGIN = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "_is_hf_initialized", "_original_object_hash"})
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Inventory:
    """What a few callables reach. facts: values by path. code: functions by name. tensors: by the first path to them.

    modules: paths of modules, the outermost first. refusals: what could not be read; a model with any can't be cached.
    Holds everything it has seen.
    """

    def __init__(self, roots: Mapping[str, Callable[..., Any]], *, whole: Iterable[str] = ()) -> None:
        """Collect what the named callables reach. whole: packages whose source counts as a whole."""
        self.facts: dict[str, str] = {}
        self.code: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.refusals: list[str] = []
        self.modules: list[str] = []
        self.codes: set[types.CodeType] = set()
        self._whole = frozenset(whole)
        self._paths: dict[int, str] = {}
        self._seen: list[Any] = []
        self._waiting: deque[tuple[str, Any]] = deque(roots.items())
        self._names: set[str] = {"forward"}  # by which torch calls a module
        self._classes: dict[type, dict[str, tuple[type, Any]]] = {}
        self._storages: dict[int, str] = {}
        self._collect()

    def path_of(self, tensor: Tensor) -> str | None:
        """Return the path of a tensor object; None where the callables do not reach it."""
        path = self._paths.get(id(tensor))
        return path if path is not None and self.tensors.get(path) is tensor else None

    def covers(self, function: types.CodeType) -> bool:
        """Tell whether code that a trace ran through is counted here."""
        return function in self.codes

    def _collect(self) -> None:
        while self._waiting:
            while self._waiting:
                path, value = self._waiting.popleft()
                self._describe(path, value)
            # Methods by name: what any code here calls by the name that some class here has.
            for owner, known in self._classes.items():
                for name in [name for name in known if name in self._names or code.is_dunder(name)]:
                    base, member = known.pop(name)
                    self._add_member(f"{code.name_of(base)}.{name}", owner, member)

    def _add_member(self, path: str, owner: type, member: Any) -> None:
        functions = code.unwrapped(member)
        for function in functions:
            self._waiting.append((path, function))
        if not functions:
            self._waiting.append((f"{path} ({owner.__qualname__})", member))

    def _describe(self, path: str, value: Any) -> None:
        if isinstance(value, _ATOMS) and not isinstance(value, enum.Enum):
            self.facts[path] = value if type(value) is str else repr(value)
            return
        if isinstance(value, (tuple, frozenset)) and not hasattr(value, "_fields") and not value:
            self.facts[path] = repr(value)
            return
        first = self._paths.get(id(value))
        if first is not None:
            if not code.is_code(value) and first != path:
                self.facts[path] = f"= {first}"
            return
        self._paths[id(value)] = path
        self._seen.append(value)
        self._describe_new(path, value)

    def _describe_new(self, path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(path, value)
        elif isinstance(value, nn.Module):
            self._add_module(path, value)
        elif isinstance(value, enum.Enum):
            self.facts[path] = f"{code.name_of(type(value))}.{value.name}"
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._add_callable(path, value)
        elif isinstance(value, types.ModuleType):
            self.facts[path] = f"module {value.__name__}"
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._add_items(path, value)
        elif isinstance(value, (tuple, list, set, frozenset, deque)):
            self._add_sequence(path, value)
        else:
            self._add_other(path, value)

    def _add_other(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, (*_OPS, *_BUILTINS)):
            self.facts[path] = getattr(value, "__qualname__", "") if isinstance(value, _BUILTINS) else str(value)
        elif isinstance(value, _OPAQUE) or kind is object:
            self.facts[path] = code.name_of(kind)
        elif isinstance(value, re.Pattern):
            self.facts[path] = repr((value.pattern, value.flags))
        elif isinstance(value, os.PathLike):
            self.facts[path] = repr(os.fspath(value))
        elif isinstance(value, weakref.ref):
            self._waiting.append((f"{path}()", value()))
        elif isinstance(value, contextvars.ContextVar):
            self._waiting.append((f"{path}.get()", value.get(None)))
        elif kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes"):
            digest = hashlib.sha256(value.tobytes()).hexdigest()[:16]
            self.facts[path] = f"{value.dtype}{list(value.shape)} {digest}"
        elif isinstance(value, fx.Graph):
            self._add_graph(path, value)
        elif hasattr(value, "__wrapped__") and callable(value) and not hasattr(kind, "forward"):
            self.facts[path] = f"a {kind.__qualname__}"
            self._waiting.append((path, value.__wrapped__))  # functools.cache and the like
        else:
            self._add_object(path, value)

    def _add_tensor(self, path: str, tensor: Tensor) -> None:
        self.tensors[path] = tensor
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            self.refusals.append(f"{path} is a {code.name_of(type(tensor))} of layout {tensor.layout}")
            return
        memory = tensor.untyped_storage()._cdata
        first = self._storages.setdefault(memory, path)
        where = "" if first == path else f", in the memory of {first}"
        dense = tensor.is_contiguous() and tensor.storage_offset() == 0
        layout = "" if dense else f", strides {list(tensor.stride())} from {tensor.storage_offset()}"
        grad = ", requires grad" if tensor.requires_grad else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        kind = type(tensor).__qualname__
        self.facts[path] = f"{kind} {dtype}{list(tensor.shape)} on {tensor.device}{layout}{grad}{where}"
        for name, value in vars(tensor).items():
            if name not in _ORIGIN and not name.startswith("_dynamo_"):  # what a trace before this one has left
                self._waiting.append((f"{path}.{name}", value))

    def _add_module(self, path: str, module: nn.Module) -> None:
        self.facts[path] = code.name_of(type(module))
        self.modules.append(path)
        if isinstance(module, torch.jit.ScriptModule):
            self.refusals.append(f"{path} is a compiled module of TorchScript")
            return
        self._add_class(type(module))
        for name, value in vars(module).items():
            if name in _REGISTRIES:
                for child, held in value.items():
                    self._waiting.append((f"{path}.{child}", held))
            elif name.endswith("_hooks") and isinstance(value, dict):
                for number, hook in enumerate(value.values()):  # by number: their ids count all hooks of the process
                    self._waiting.append((f"{path}.{name}[{number}]", hook))
            elif not (name in _ORIGIN or (name.startswith("_") and "hooks" in name and not value)):
                self._waiting.append((f"{path}.{name}", value))

    def _add_class(self, owner: type) -> None:
        if owner not in self._classes:
            self._classes[owner] = code.members(owner, self._whole)

    def _add_callable(self, path: str, value: Any) -> None:
        if isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._waiting.append((f"{path}.{name}", getattr(value, name)))
        elif isinstance(value, types.MethodType):
            self._waiting += [(path, value.__func__), (f"{path}.__self__", value.__self__)]
        else:
            self._add_function(path, value)

    def _add_function(self, path: str, function: types.FunctionType) -> None:
        name = code.name_of(function)
        if path not in (name, name.replace(":", ".")) and not path.startswith(name):
            self.facts[path] = f"function {name}"
        package = code.package_of(function)
        self.codes.update(code.nested(function.__code__))
        if code.is_whole(package, self._whole):
            # Wrappers of torch and of the standard library: what they wrap may be anybody's.
            inner = [(key, held) for key, held in code.callables_in(function) if code.is_code(held)]
            self._waiting += [(f"{name}.{key}", held) for key, held in inner]
            return
        self._count(name, code.digest_of(function.__code__))
        self._names.update(code.names_of(function))
        parts = [*code.callables_in(function), *vars(function).items()]
        parts += [("defaults", function.__defaults__), ("kwdefaults", function.__kwdefaults__)]
        self._waiting += [(f"{name}.{key}", held) for key, held in parts if held is not None]
        for key, text in code.environment_of(function):
            self.facts[f"environment {key}"] = text
        self._add_globals(function)

    def _count(self, name: str, digest: str) -> None:
        """Note a function; different ones of one name (made by one decorator) count together, in any order."""
        known = set(self.code.get(name, "").split())
        self.code[name] = " ".join(sorted(known | {digest}))

    def _add_globals(self, function: types.FunctionType) -> None:
        space = function.__globals__
        names = code.names_of(function)
        for name in names:
            if name in space:
                value = space[name]
            elif name in sys.modules:  # an import within the function
                value = sys.modules[name]
            else:
                continue
            if isinstance(value, types.ModuleType):
                self._add_attributes(value, frozenset(names), set())
            else:
                self._waiting.append((f"{space.get('__name__')}:{name}", value))

    def _add_attributes(self, module: types.ModuleType, names: frozenset[str], seen: set[str]) -> None:
        """Note what code may read from a module: all of its names that the code uses, modules in it included."""
        if module.__name__ in seen:
            return
        seen.add(module.__name__)
        whole = code.is_whole(module.__name__.partition(".")[0], self._whole)
        for name in sorted(names & vars(module).keys()):
            value, path = vars(module)[name], f"{module.__name__}:{name}"
            if isinstance(value, types.ModuleType):
                self._add_attributes(value, names, seen)
            elif not whole:
                self._waiting.append((path, value))
            elif isinstance(value, types.FunctionType) and not code.is_whole(code.package_of(value), self._whole):
                self._waiting.append((path, value))  # somebody's own in the place of one of torch's
            elif getattr(value, "__name__", name) != name:
                self.facts[path] = str(value.__name__)  # another name for it, or another function in its place

    def _add_items(self, path: str, mapping: Mapping[Any, Any]) -> None:
        self.facts[path] = f"{type(mapping).__qualname__} of {len(mapping)}"
        self._add_class(type(mapping))
        for number, (key, value) in enumerate(mapping.items()):
            if isinstance(key, _ATOMS):
                name = repr(key)
            elif isinstance(key, (type, types.FunctionType)):
                name = code.name_of(key)
            elif isinstance(key, enum.Enum):
                name = str(key)
            else:
                name = f"#{number}"
                self._waiting.append((f"{path} key {name}", key))
            self._waiting.append((f"{path}[{name}]", value))
        self._add_state(path, mapping)

    def _add_sequence(self, path: str, items: Any) -> None:
        self.facts[path] = f"{type(items).__qualname__} of {len(items)}"
        if isinstance(items, (set, frozenset)):
            items = sorted(items, key=lambda item: repr(item) if isinstance(item, _ATOMS) else type(item).__qualname__)
        if all(isinstance(item, _ATOMS) for item in items):
            self.facts[path] += f": {list(items)!r}"
            return
        for number, item in enumerate(items):
            self._waiting.append((f"{path}[{number}]", item))

    def _add_graph(self, path: str, graph: fx.Graph) -> None:
        self.facts[path] = str(graph.python_code("self").src)
        for node in graph.nodes:
            if node.op == "call_function":
                self._waiting.append((f"{path}.{node.name}", node.target))

    def _add_object(self, path: str, value: Any) -> None:
        kind = type(value)
        self.facts[path] = code.name_of(kind)
        if not hasattr(value, "__dict__") and not _slots(kind):
            self.refusals.append(f"{path} is a {code.name_of(kind)}, whose state can't be read")
            return
        self._add_class(kind)
        self._add_state(path, value)

    def _add_state(self, path: str, value: Any) -> None:
        state = dict(getattr(value, "__dict__", {}))
        state |= {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        for name, held in state.items():
            if name not in _ORIGIN:
                self._waiting.append((f"{path}.{name}", held))


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in found if name not in ("__dict__", "__weakref__")]
