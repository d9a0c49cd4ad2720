"""Everything that calling a model can depend on, read off the callables: values, tensors and code, by path.

A trace is a function of what its Python reads. So all is collected that can be read: attributes, containers, closures
and globals by value; tensors by what a graph sees of them, not by content; functions by what they do, hooks and those
put on single modules included. What can't be read is a reason not to cache, never left out.

No fact may stand for two things, and none may be lost. So each object counts under a name of its own (a second function
or class of a name is numbered), each place where it stands says which one stands there, and order is told where Python
can follow it.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import logging
import os
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.compilation.cache import code
from core.compilation.cache.reached import ATOMS, Reached

_OPAQUE = (
    *(logging.Logger, logging.LoggerAdapter, logging.Handler),
    *(type(threading.Lock()), type(threading.RLock())),
)
"""State that no result depends on."""
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
_BUILTINS = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
# Where a model was read from, a hash that each process makes anew, texts for readers: these say nothing of what it is.
_ORIGIN = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "_is_hf_initialized", "_original_object_hash"}
    | {"__doc__", "__annotations__"}
)
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Inventory(Reached):
    """What a few callables reach. facts: values by path. code: functions by name. tensors: by the first path to them.

    modules: paths of modules, the outermost first. refusals: what could not be read; a model with any can't be cached.
    unloaded: modules that a function imports when it runs, and that were not there yet. Holds everything it has seen.
    """

    def __init__(self, roots: Mapping[str, Callable[..., Any]], *, whole: Iterable[str] = ()) -> None:
        """Collect what the named callables reach. whole: packages whose source counts as a whole."""
        super().__init__(whole)
        self.tensors: dict[str, Tensor] = {}
        self.refusals: list[str] = []
        self.modules: list[str] = []
        self._paths: dict[int, str] = {}
        self._waiting.extend([*roots.items(), *code.patches(self._whole)])
        self._storages: dict[int, str] = {}
        self._collect()
        if self._asks_environment:
            for name in sorted(self._texts & os.environ.keys()):
                self.facts[f"environment {name}"] = repr(os.environ[name])

    def path_of(self, tensor: Tensor) -> str | None:
        """Return the path of a tensor object; None where the callables do not reach it."""
        path = self._paths.get(id(tensor))
        return path if path is not None and self.tensors.get(path) is tensor else None

    def _collect(self) -> None:
        while self._waiting:
            while self._waiting:
                path, value = self._waiting.popleft()
                self._describe(path, value)
            self._add_named()

    def _describe(self, path: str, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS or (kind in (tuple, frozenset) and not value):
            self.note(path, repr(value))
            self._texts.update([value] if kind is str else ())
            return
        if isinstance(value, (types.FunctionType, type)):
            self._describe_named(path, value)
            return
        first = self._paths.get(id(value))
        if first is not None:
            if first != path:
                self.note(path, f"= {first}")
            return
        path = self.numbered(path)
        self._paths[id(value)] = path
        self._seen.append(value)
        self._describe_new(path, value)

    def _describe_named(self, path: str, value: types.FunctionType | type) -> None:
        """Say which function or class stands here, each time, and once what it is."""
        name = self.own_name(value)
        if path != name:
            self.note(path, f"{'class' if isinstance(value, type) else 'function'} {name}")
        if id(value) in self._paths:
            return
        self._paths[id(value)] = name
        if isinstance(value, type):
            self._add_class(value)
        else:
            self._add_function(name, value)

    def _describe_new(self, path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(path, value)
        elif isinstance(value, nn.Module):
            self._add_module(path, value)
        elif isinstance(value, enum.Enum):
            self.note(path, f"{self.own_name(type(value))}.{value.name}")
            self._waiting.append((f"{path}.value", value._value_))
            self._add_class(type(value))
        elif isinstance(value, functools.partial):
            self._waiting += [(f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords")]
            self._add_state(path, value)
        elif isinstance(value, types.MethodType):
            self._waiting += [(path, value.__func__), (f"{path}.__self__", value.__self__)]
        elif isinstance(value, types.ModuleType):
            self.note(path, f"module {value.__name__}")
            if not code.is_whole(value.__name__.partition(".")[0], self._whole):
                self._add_values(f"{self.own_name(vars(value), value.__name__)}:", code.plain_members(value))
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._add_items(path, value)
        elif isinstance(value, (tuple, list, set, frozenset, deque)):
            self._add_sequence(path, value)
        else:
            self._add_other(path, value)

    def _add_other(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, (*_OPS, types.UnionType, types.GenericAlias)):
            self.note(path, str(value))
        elif isinstance(value, _BUILTINS):
            self.note(path, f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}")
            owner = getattr(value, "__self__", None)  # of `mapping.get`, the mapping
            self._waiting += [] if isinstance(owner, types.ModuleType) else [(f"{path}.__self__", owner)]
        elif isinstance(value, ATOMS):
            self.note(path, f"{self.own_name(kind)} {code.plain_repr(value, ATOMS)}")
            self._add_class(kind)
            self._add_state(path, value)
        elif isinstance(value, _OPAQUE) or kind is object:
            self.note(path, code.name_of(kind))
        elif value is os.environ:
            self.note(path, "os.environ")
            self._asks_environment = True
        elif isinstance(value, re.Pattern):
            self.note(path, repr((value.pattern, value.flags)))
        elif isinstance(value, os.PathLike):
            self.note(path, repr(os.fspath(value)))
        elif isinstance(value, weakref.ref):
            self._waiting.append((f"{path}()", value()))
        elif isinstance(value, contextvars.ContextVar):
            self._waiting.append((f"{path}.get()", value.get(None)))
        elif kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes"):
            digest = hashlib.sha256(value.tobytes()).hexdigest()[:16]
            self.note(path, f"{value.dtype}{list(value.shape)} {digest}")
        elif isinstance(value, fx.Graph):
            self._add_graph(path, value)
        elif hasattr(value, "__wrapped__") and callable(value) and not hasattr(kind, "forward"):
            self.note(path, f"a {kind.__qualname__}")
            self._waiting.append((path, value.__wrapped__))  # functools.cache and the like
            if not code.is_whole(code.package_of(kind), self._whole):
                self._add_class(kind)
                self._add_state(path, value)
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
        self.note(path, f"{kind} {dtype}{list(tensor.shape)} on {tensor.device}{layout}{grad}{where}")
        for name, value in vars(tensor).items():
            if name not in _ORIGIN and not name.startswith("_dynamo_"):  # what a trace before this one has left
                self._waiting.append((f"{path}.{name}", value))

    def _add_module(self, path: str, module: nn.Module) -> None:
        self.note(path, self.own_name(type(module)))
        self.modules.append(path)
        if isinstance(module, torch.jit.ScriptModule):
            self.refusals.append(f"{path} is a compiled module of TorchScript")
            return
        self._add_class(type(module))
        for name, value in vars(module).items():
            if name in _REGISTRIES:
                self._waiting += [(f"{path}.{child}", held) for child, held in value.items()]
                if len(value) > 1:  # in which order they are called, where a model calls all of them
                    self.note(f"{path}.{name}", ", ".join(value))
            elif name in _HOOKS and isinstance(value, dict):
                for number, hook in enumerate(value.values()):  # by number: their ids count all hooks of the process
                    self._waiting.append((f"{path}.{name}[{number}]", hook))
            elif name not in _ORIGIN:
                self._waiting.append((f"{path}.{name}", value))

    def _add_items(self, path: str, mapping: Mapping[Any, Any]) -> None:
        kind, names = type(mapping), []
        for number, (key, value) in enumerate(code.items_of(path, mapping)):
            if type(key) in ATOMS:
                name = repr(key)
                self._texts.update([key] if type(key) is str else ())
            elif isinstance(key, (type, types.FunctionType)):
                name = self.own_name(key)
            else:
                name = f"#{number}"
                self._waiting.append((f"{path} key {name}", key))
            names.append(name)
            self._waiting.append((f"{path}[{name}]", value))
        self.note(path, f"{self.own_name(kind)} of {len(names)}: {', '.join(names)}")
        self._add_class(kind)
        self._add_state(path, mapping)

    def _add_sequence(self, path: str, items: Any) -> None:
        kind = type(items)
        text = f"{kind.__qualname__} of {len(items)}"
        if kind not in (tuple, list, set, frozenset):
            text = f"{self.own_name(kind)} of {len(items)}, at most {getattr(items, 'maxlen', None)}"
            self._add_class(kind)
            self._add_state(path, items)
        if isinstance(items, (set, frozenset)):
            items = sorted(items, key=_order)
        if all(type(item) in ATOMS for item in items):
            text += f": {list(items)!r}"
            self._texts.update(item for item in items if type(item) is str)
        else:
            self._waiting += [(f"{path}[{number}]", item) for number, item in enumerate(items)]
        self.note(path, text)

    def _add_graph(self, path: str, graph: fx.Graph) -> None:
        self.note(path, str(graph.python_code("self").src))
        for node in graph.nodes:
            if node.op == "call_function":
                self._waiting.append((f"{path}.{node.name}", node.target))

    def _add_object(self, path: str, value: Any) -> None:
        kind = type(value)
        self.note(path, self.own_name(kind))
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


def _order(item: Any) -> str:
    """Return what a set is sorted by; its own order differs between processes."""
    if type(item) in ATOMS:
        return repr(item)
    return code.name_of(item if isinstance(item, (type, types.FunctionType)) else type(item))


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in found if name not in ("__dict__", "__weakref__")]
