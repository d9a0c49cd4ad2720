"""Live values as text: whatever a trace can depend on, so that comparing two starts' texts shows any change.

A text is shallow. An attribute or an element has its own text if a trace has read it. Code counts by what it does: a
function by its bytecode, defaults and closure, a class by its members whose names the trace used.
"""

from __future__ import annotations

import abc
import enum
import functools
import hashlib
import re
import struct
import sys
import types
import weakref
from _abc import _get_dump  # type: ignore[import-not-found]  # the one way to the registry
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import device_mesh

from core.common.passes.identity import bytecode
from core.compilation.cache.uncacheable import Uncacheable

ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, types.EllipsisType, type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
)
"""Values that stand for themselves as text."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_BUILTINS = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
)
_BY_TEXT = (
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator, torch._ops._OpNamespace),
    *(types.UnionType, types.GenericAlias, re.Pattern, torch._ops._Ops),
)
_GROUPS: tuple[Any, ...] = (torch.distributed.ProcessGroup,) if torch.distributed.is_available() else ()
_MESHES: tuple[Any, ...] = (device_mesh.DeviceMesh,) if torch.distributed.is_available() else ()
_STATELESS = (object, types.CellType, weakref.ref)
"""Classes whose objects have no state of their own, or only refer to objects that have texts of their own."""
_MAPPINGS, _SEQUENCES, _SETS = (dict, types.MappingProxyType), (tuple, list, deque), (set, frozenset)
_FROZEN = (*ATOMS, tuple, frozenset)
_LONGEST = 400
_ALL = frozenset({"__dict__", "vars"})
"""Names by which code asks for all attributes of an object."""
_CALLED = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
_OF_MODULES = ("__init__", "__setstate__")
"""Members that construct a module, which no traced code calls; Dynamo wraps those of nn.Module once it has traced."""
_MAKING = frozenset({"__init__", "__new__", "__del__", "__repr__", "__str__", "__init_subclass__", "__class_getitem__"})


def name_of(value: Any) -> str:
    """Return `module:qualified.name` of a function or class."""
    return f"{value.__module__}:{value.__qualname__}"


@functools.lru_cache(maxsize=16384)
def digest_of(code: types.CodeType) -> str:
    """Return a digest of what a code object does, and of how it takes its arguments."""
    parameters = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return text_digest(repr((bytecode(code)[0], parameters, names)))


def names_in(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """Return the names by which code may ask for members, and the names of the functions themselves."""
    found: set[str] = set()
    for code in codes:
        found.update((code.co_name, *bytecode(code)[1]))
        found.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
    return frozenset(found)


def nested(code: types.CodeType) -> Iterable[types.CodeType]:
    """Yield a code object and those within it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested(const)


def text_digest(text: str) -> str:
    """Return a digest of a text, 16 characters long."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tensor_text(tensor: Tensor) -> str:
    """Return the metadata of a tensor that a graph depends on: class, dtype, shape, device and layout."""
    dense = tensor.is_contiguous() and tensor.storage_offset() == 0
    layout = "" if dense else f", strides {list(tensor.stride())} from {tensor.storage_offset()}"
    grad = ", requires grad" if tensor.requires_grad else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{type(tensor).__qualname__} {dtype}{list(tensor.shape)} on {tensor.device}{layout}{grad}"


class Texts:
    """Texts of values, the same for equal values in every process. `codes` collects the functions whose code the texts
    hold."""

    def __init__(self, names: frozenset[str]) -> None:
        """names: the members of a class that count."""
        self.codes: set[types.CodeType] = set()
        self._names = names
        self._known: dict[int, tuple[Any, str]] = {}

    def of(self, value: Any) -> str:
        """Return the text of a value; raise `Uncacheable` for one whose state can't be read."""
        text = self._text(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… {text_digest(text)}"

    def _text(self, value: Any) -> str:
        kind = type(value)
        if kind in ATOMS:
            return repr(value)
        if isinstance(value, Tensor):
            if kind not in _PLAIN or value.layout != torch.strided:
                raise Uncacheable(f"is a {name_of(kind)} of layout {value.layout}")
            return tensor_text(value)
        if isinstance(value, (types.FunctionType, type)):
            return self._code_text(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, enum.Enum):
            return f"{name_of(kind)}.{value.name} {self._held(value._value_)}"
        if isinstance(value, nn.Module):
            return self._attributed(value)
        return self._container_text(value) or self._object_text(value)

    def _code_text(self, value: types.FunctionType | type) -> str:
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = (value, name_of(value))  # for a function that refers to itself
            describe = self._code_of_class if isinstance(value, type) else self._code_of_function
            known = self._known[id(value)] = (value, f"{name_of(value)}{describe(value)}")  # type: ignore[arg-type]
        return known[1]

    def _code_of_function(self, function: types.FunctionType) -> str:
        self.codes.update(nested(function.__code__))
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
        for cell in function.__closure__ or ():
            try:
                given.append(cell.cell_contents)
            except ValueError:  # a name that gets its value later
                given.append(None)
        return _code(" ".join((digest_of(function.__code__), *map(self._held, given))))

    def _code_of_class(self, owner: type) -> str:
        found: dict[str, str] = {}
        of_classes: Any = type(owner)
        for base in (*reversed(of_classes.__mro__[:-2]), *reversed(owner.__mro__[:-1])):
            for name, member in vars(base).items():
                if name in _OF_MODULES and issubclass(owner, nn.Module):
                    continue
                if name in self._names or name in _CALLED or _is_called_unseen(name, member):
                    found[name] = self._member(member)
        if issubclass(owner, enum.Enum):
            found["__members__"] = ", ".join(f"{each.name} {self._held(each._value_)}" for each in owner)
        registered = _registered(owner)
        if registered:
            found["register"] = registered
        bases = ", ".join(map(name_of, (of_classes, *owner.__mro__[1:-1])))
        return _code(f"{bases} {sorted(found.items())}") if found else ""

    def _member(self, member: Any) -> str:
        if isinstance(member, (staticmethod, classmethod, functools.cached_property)):
            inner: Any = getattr(member, "__func__", None) or member.func  # type: ignore[union-attr]
            return f"{type(member).__name__} {self._held(inner)}"
        if isinstance(member, property):
            return f"property {self._held(member.fget)}"
        return self._held(member)

    def _held(self, value: Any) -> str:
        """Return the text of a value inside code: an object's plain attributes, or the class of a value without a
        text."""
        try:
            text = self._text(value)
        except Uncacheable:
            return name_of(type(value))
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict) and not isinstance(value, (type, types.ModuleType, nn.Module, Tensor)):
            plain = sorted((name, repr(held)) for name, held in state.items() if type(held) in ATOMS)
            text += f" {plain}" if plain else ""
        return text

    def _container_text(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, _MAPPINGS):
            return f"{self._kind(kind)} of {len(value)}: {', '.join(self._keys(value))}"
        if isinstance(value, _SETS):
            return f"{self._kind(kind)} of {len(value)}: {', '.join(sorted(map(self._held, value)))}"
        if not isinstance(value, _SEQUENCES):
            return ""
        most = f", at most {value.maxlen}" if isinstance(value, deque) else ""
        held = (self._held(each) if type(each) in _FROZEN else f"a {type(each).__qualname__}" for each in value)
        return f"{self._kind(kind)} of {len(value)}{most}: {', '.join(held)}"

    def _keys(self, mapping: Mapping[Any, Any]) -> Iterable[str]:
        # A subclass's attribute access might import modules.
        known = next((kind for kind in (OrderedDict, dict) if isinstance(mapping, kind)), None)
        for key in known.keys(mapping) if known is not None else mapping:  # type: ignore[arg-type]
            if type(key) in ATOMS:
                yield repr(key)
            elif isinstance(key, (type, types.FunctionType, enum.Enum, tuple)):
                yield self._held(key)
            else:
                raise Uncacheable(f"has a {name_of(type(key))} for a key")

    def _kind(self, kind: type) -> str:
        return kind.__qualname__ if kind.__module__ in ("builtins", "collections") else self._code_text(kind)

    def _object_text(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, types.MethodType):
            return f"method {self._text(value.__func__)} of a {name_of(type(value.__self__))}"
        if isinstance(value, functools.partial):
            given = (*value.args, *value.keywords.items())
            return f"partial {self._held(value.func)} {', '.join(map(self._held, given))}"
        if isinstance(value, _BUILTINS):
            owner = getattr(value, "__self__", None)
            of = "" if owner is None or isinstance(owner, types.ModuleType) else f" of {self._held(owner)}"
            return f"{getattr(value, '__module__', None)}.{value.__qualname__}{of}"
        if isinstance(value, _BY_TEXT):
            return str(value)
        if isinstance(value, ATOMS):
            plain: Any = next(base for base in kind.__mro__ if base in ATOMS)
            return f"{self._code_text(kind)} {plain.__repr__(value)}"
        if isinstance(value, _MESHES):  # Dynamo makes numbers of what its methods say
            names, place = value.mesh_dim_names, value.get_coordinate()
            return f"mesh {names} of {value.device_type}: {value.mesh.tolist()}, this process at {place}"
        if isinstance(value, types.CodeType):
            return f"code {digest_of(value)}"
        if isinstance(value, _GROUPS):  # what code can ask it for without sending anything
            return f"group {value.group_name!r} of processes: rank {value.rank()} of {value.size()}, {value.name()}"
        if isinstance(value, (staticmethod, classmethod, property, functools.cached_property)):
            return self._member(value)
        if isinstance(value, functools._lru_cache_wrapper):
            return f"a cache of {self._held(value.__wrapped__)}"
        if kind in _STATELESS:
            return f"a {name_of(kind)}"
        if not _shows_all(value):
            raise Uncacheable(f"is a {name_of(kind)}, whose state can't be read")
        return self._attributed(value)

    def _attributed(self, value: Any) -> str:
        """Return the text of an object: its class, and which of its own attributes shadow those of the class."""
        kind, own = type(value), getattr(value, "__dict__", ())
        falls = hasattr(kind, "__getattr__") and not isinstance(value, nn.Module)
        first = [name for name in self._names.intersection(own) if falls or hasattr(kind, name)]
        told = own if not _ALL.isdisjoint(self._names) else first
        return f"a {self._code_text(kind)}{' with ' if told else ''}{', '.join(sorted(told))}"


def _is_called_unseen(name: str, member: Any) -> bool:
    """Tell whether Python calls a member of a class implicitly, without its name in the code."""
    dunder = name.startswith("__") and name.endswith("__") and name not in _MAKING
    return dunder and isinstance(member, (types.FunctionType, property, staticmethod, classmethod))


def _registered(owner: type) -> str:
    """Return the classes that count as derived from an abstract one by `register`, unless it is Python's own."""
    if not isinstance(owner, abc.ABCMeta) or owner.__module__.partition(".")[0] in sys.stdlib_module_names - {
        "__main__"
    }:
        return ""
    held = (reference() for reference in _get_dump(owner)[0])
    return ", ".join(sorted(name_of(each) for each in held if each is not None))


def _code(text: str) -> str:
    return f" (code {text_digest(text)})"


def _shows_all(value: Any) -> bool:
    """Tell whether an object's state lies in its attributes, which have their own texts; objects of C types hide
    theirs."""
    slots = sum(len((names,) if isinstance(names, str) else names) for names in _slots(type(value)))
    if not slots and not hasattr(value, "__dict__"):
        return False
    return type(value).__basicsize__ <= object.__basicsize__ + (slots + _POINTERS) * struct.calcsize("P")


_POINTERS = 2
"""Most pointers that an object has besides its slots: to its `__dict__` and to its weak references."""


def _slots(kind: type) -> Iterable[Any]:
    return (vars(base)["__slots__"] for base in kind.__mro__ if "__slots__" in vars(base))
