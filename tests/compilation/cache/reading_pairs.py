"""What models read of Python, one kind at a time, and how each of it may change between two starts."""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import math
import os
import string
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compilation.cache import read_elsewhere
from tests.compilation.cache.reading_model import (
    Base,
    Both,
    Called,
    Choice,
    Descriptor,
    Everything,
    Falls,
    Left,
    Made,
    Meta,
    OtherWay,
    Pair,
    Read,
    Right,
    Settings,
    Whole,
    Word,
    attributed,
    closing,
    decorated,
    other,
    plain,
    with_helper,
    with_other_helper,
)

Change = Callable[[Any, pytest.MonkeyPatch], Any]
NUMBER = 2.0
TABLE: dict[str, Any] = {"act": torch.relu, "by": 2.0}
VARIABLES = {"CORE_TEST_SET": "2", "CORE_TEST_GONE": "2", "CORE_TEST_ASKED": "2", "CORE_TEST_NAMED": "2"}


def sets(name: str, value: Any) -> Change:
    """Return the change of one attribute of the model."""
    return lambda model, patch: patch.setattr(model, name, value)


def patches(target: Any, name: str, value: Any) -> Change:
    """Return the change of one attribute of something that is no part of the model."""
    return lambda model, patch: patch.setattr(target, name, value, raising=False)


def does(change: Callable[[Any], Any]) -> Change:
    """Return a change of the model that nothing undoes but a model of one's own."""
    return lambda model, patch: change(model)


def tried(model: Any, x: Tensor) -> Tensor:
    try:
        return x * model.tried["b"]  # type: ignore[no-any-return]
    except KeyError:
        return x


def walked(model: Any, x: Tensor) -> Tensor:
    for by in model.walked.values():
        x = x * 2 + by
    return x


def ordered(model: Any, x: Tensor) -> Tensor:
    for name in model.ordered:
        x = x + 1 if name == "a" else x * 2
    return x


def each_module(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def each_named(model: Any, x: Tensor) -> Tensor:
    for layer in model.named.values():
        x = layer(x)
    return x


def each_call(model: Any, x: Tensor) -> Tensor:
    for call in model.list_of_calls:
        x = call(x) + 1
    return x


def imported(model: Any, x: Tensor) -> Tensor:
    from tests.compilation.cache.read_elsewhere import LATE

    return x * LATE


def of_environment(model: Any, x: Tensor) -> Tensor:
    return x * float(os.environ["CORE_TEST_SET"]) + len(os.environ.get("CORE_TEST_ABSENT", ""))


def of_numpy(model: Any, x: Tensor) -> Tensor:
    return x * float(np.gain)


def enum_of_more(model: Any, patch: pytest.MonkeyPatch) -> None:
    more = enum.Enum("Choice", {"ONE": 1.5, "TWO": 2.5, "THREE": 3.5}, module=Choice.__module__)
    patch.setattr(sys.modules[__name__], "Choice", more)


PAIRS: dict[str, tuple[Read, Change]] = {
    # What stands in a module.
    "int": (lambda m, x: x * m.number, sets("number", 4)),
    "bool": (lambda m, x: x + 1 if m.flag else x, sets("flag", False)),
    "str": (lambda m, x: x + 1 if m.word == "one" else x, sets("word", "two")),
    "None": (lambda m, x: x + 1 if m.nothing is None else x, sets("nothing", 0)),
    "float": (lambda m, x: x * m.fraction, sets("fraction", 1.25)),
    "int for float": (lambda m, x: x * m.fraction, sets("fraction", 1)),
    "complex": (lambda m, x: x + (m.turned * m.turned).real, sets("turned", 3j)),
    "bytes": (lambda m, x: x + len(m.raw), sets("raw", b"three")),
    "dtype": (lambda m, x: x.to(m.kind).float(), sets("kind", torch.bfloat16)),
    "slice": (lambda m, x: x + m.part.stop, sets("part", slice(0, 3))),
    "range": (lambda m, x: x + len(m.steps), sets("steps", range(4))),
    "size": (lambda m, x: x + m.size[1], sets("size", torch.Size((2, 4)))),
    "device": (lambda m, x: x + 1 if m.where.type == "cpu" else x, sets("where", torch.device("meta"))),
    "item of a tuple": (lambda m, x: x * m.several[1], sets("several", (1, 3))),
    "item of a list": (lambda m, x: x * m.listed[1], does(lambda m: m.listed.__setitem__(1, 3.0))),
    "length of a list": (lambda m, x: x + len(m.counted), does(lambda m: m.counted.append(3))),
    "item of a dict": (lambda m, x: x * m.mapped["a"], does(lambda m: m.mapped.update(a=3.0))),
    "key that a dict lacks": (lambda m, x: x * m.asked.get("b", 1), does(lambda m: m.asked.update(b=2))),
    "key that is tried": (tried, does(lambda m: m.tried.update(b=2))),
    "order of a dict": (walked, sets("walked", {"b": 3.0, "a": 2.0})),
    "more in a dict that is walked": (walked, does(lambda m: m.walked.update(c=1.0))),
    "order of functions of one name": (
        lambda m, x: m.steps_of_one_name[1](m.steps_of_one_name[0](x)),
        does(lambda m: m.steps_of_one_name.reverse()),
    ),
    "order of an ordered dict": (ordered, does(lambda m: m.ordered.move_to_end("a"))),
    "member of a set": (lambda m, x: x + 1 if "c" in m.members else x, does(lambda m: m.members.add("c"))),
    "frozen set": (lambda m, x: x + 1 if "c" in m.frozen else x, sets("frozen", frozenset({"a", "c"}))),
    "item of a deque": (lambda m, x: x * m.queue[1], does(lambda m: m.queue.append(3.0))),
    "attribute of a namespace": (lambda m, x: x * m.nested.by, does(lambda m: setattr(m.nested, "by", 3.0))),
    "item deep inside": (
        lambda m, x: x * m.deep.inner[0]["by"],
        does(lambda m: m.deep.inner[0].update(by=3.0)),
    ),
    "field of a dataclass": (lambda m, x: x * m.settings.by, does(lambda m: setattr(m.settings, "by", 3.0))),
    "slot": (lambda m, x: x * m.slots.by, does(lambda m: setattr(m.slots, "by", 3.0))),
    "attribute before __getattr__": (lambda m, x: x * m.falls.by, does(lambda m: setattr(m.falls, "by", 3.0))),
    "code of __getattr__": (lambda m, x: x * m.falls.by, patches(Falls, "__getattr__", lambda self, name: 3.0)),
    "field of a named tuple": (lambda m, x: x * m.pair.second, sets("pair", Pair(1.0, 3.0))),
    "member of an enum": (lambda m, x: x * m.choice.value, sets("choice", Choice.TWO)),
    "value of a member of an enum": (lambda m, x: x * m.choice.value, patches(Choice.ONE, "_value_", 3.5)),
    "number of a class of its own": (lambda m, x: x * m.whole, sets("whole", Whole(3))),
    "word of a class of its own": (lambda m, x: x + 1 if m.text == "one" else x, sets("text", Word("two"))),
    "attribute that is there": (
        lambda m, x: x + 1 if hasattr(m, "present") else x,
        does(lambda m: delattr(m, "present")),
    ),
    "attribute that is not there": (
        lambda m, x: x + 1 if hasattr(m, "absent") else x,
        does(lambda m: setattr(m, "absent", 1)),
    ),
    "default of getattr": (lambda m, x: x * getattr(m, "missing", 2.0), does(lambda m: setattr(m, "missing", 3.0))),
    "attribute of a composed name": (lambda m, x: x * getattr(m, f"factor_{2}"), patches(Everything, "factor_2", 3.0)),
    "mode of training": (lambda m, x: x + 1 if m.training else x, sets("training", True)),
    "mode of a dropout": (lambda m, x: m.dropout(x), does(lambda m: m.dropout.train())),
    "number of a norm": (lambda m, x: m.norm(x), does(lambda m: setattr(m.norm, "eps", 1e-3))),
    "weak reference": (lambda m, x: x * m.weak().by, does(lambda m: setattr(m.target, "by", 3.0))),
    "constant that is returned": (lambda m, x: x, patches(Everything, "handed_through", 8)),
    # What stands in a class.
    "class constant": (lambda m, x: x * m.factor, patches(Everything, "factor", 3.0)),
    "class constant, set on the object": (lambda m, x: x * m.factor, does(lambda m: setattr(m, "factor", 3.0))),
    "inherited constant": (lambda m, x: x * m.inherited, patches(Base, "inherited", 3.0)),
    "constant that a subclass gets": (lambda m, x: x * m.overridden, patches(Everything, "overridden", 3.0)),
    "property": (lambda m, x: x * m.computed, patches(Base, "computed", property(lambda self: 3))),
    "method": (lambda m, x: m.scaled(x), patches(Everything, "scaled", lambda self, x: x * 3)),
    "name of a class": (
        lambda m, x: x + len(type(m).__name__),
        does(lambda m: setattr(m, "__class__", type("Other", (Everything,), {}))),
    ),
    "class of an object": (lambda m, x: x * m.bases.side(), sets("bases", OtherWay())),
    "method of an object's class": (lambda m, x: x * m.bases.side(), patches(Left, "side", lambda self: 4.0)),
    "method that a class gets": (lambda m, x: x * m.bases.side(), patches(Both, "side", lambda self: 4.0)),
    "class that is held": (lambda m, x: x + 1 if m.class_held is Left else x, sets("class_held", Right)),
    "kind of an object": (lambda m, x: x + 1 if isinstance(m.instance, Called) else x, sets("instance", Left())),
    "static method": (lambda m, x: m.call.static(x), patches(Called, "static", staticmethod(lambda x: x * 3))),
    "class method": (lambda m, x: m.call.of_class(x), patches(Called, "by", 3.0)),
    "__call__": (lambda m, x: m.call(x), patches(Called, "__call__", lambda self, x: x * 3)),
    "attribute of torch's class": (lambda m, x: x * m.linear.gain, patches(nn.Linear, "gain", 3.0)),
    "attribute of nn.Module": (lambda m, x: x * m.linear.drift, patches(nn.Module, "drift", 3.0)),
    "forward of torch's class": (lambda m, x: m.linear(x), patches(nn.Linear, "forward", lambda self, x: x * 3)),
    "__call__ of nn.Module": (
        lambda m, x: m.linear(x),
        patches(nn.Module, "_call_impl", lambda self, *args: self.forward(*args) * 2),
    ),
    "constant of a class that is made": (lambda m, x: x * Made().size, patches(Made, "size", 3.0)),
    "constant of a class within": (lambda m, x: x * Made.Inner.by, patches(Made.Inner, "by", 3.0)),
    "constant of a class of classes": (lambda m, x: x * Made.by, patches(Meta, "by", 3.0)),
    "constant of a descriptor": (lambda m, x: x * m.described, patches(Descriptor, "by", 3.0)),
    "code of a descriptor": (lambda m, x: x * m.described, patches(Descriptor, "__get__", lambda *_: 3.0)),
    "pair of pairs of a class": (
        lambda m, x: x * m.paired[1][0],
        patches(Everything, "paired", ((1.0, 2.0), (5.0, 4.0))),
    ),
    "dict of a class": (lambda m, x: x * m.tabled["a"], patches(Everything, "tabled", {"a": 3.0})),
    "members of an enum": (lambda m, x: x * sum(each.value for each in Choice), enum_of_more),
    "number of torch's": (lambda m, x: x + torch.finfo(m.kind).eps, sets("kind", torch.float16)),
    "sorted keys": (lambda m, x: x + len(sorted(m.tabled)[0]), patches(Everything, "tabled", {"aa": 2.0})),
    "items of two lists": (
        lambda m, x: x * sum(a * b for a, b in zip(m.listed, m.counted, strict=False)),
        does(lambda m: m.counted.__setitem__(0, 5)),
    ),
    "text that is put together": (
        lambda m, x: x + len(f"{m.word}-{NUMBER}"),
        patches(sys.modules[__name__], "NUMBER", 22.0),
    ),
    "comparison of objects": (
        lambda m, x: x + 1 if m.settings == Settings(2.0) else x,
        does(lambda m: setattr(m.settings, "by", 4.0)),
    ),
    "identity of objects": (
        lambda m, x: x + 1 if m.target is m.settings else x,
        does(lambda m: setattr(m, "target", m.settings)),
    ),
    # Modules and hooks.
    "hook": (lambda m, x: m.hooked(x), does(lambda m: m.hooked.register_forward_hook(lambda *a: a[2] * 2))),
    "hook before": (
        lambda m, x: m.pre_hooked(x),
        does(lambda m: m.pre_hooked.register_forward_pre_hook(lambda *a: (a[1][0] * 2,))),
    ),
    "forward of one module": (
        lambda m, x: m.forwarded(x),
        does(lambda m: setattr(m.forwarded, "forward", lambda x: x * 3)),
    ),
    "submodule": (lambda m, x: m.swapped(x), sets("swapped", nn.Sigmoid())),
    "number of layers": (each_module, does(lambda m: m.layers.append(nn.Linear(8, 8)))),
    "order of a sequence": (
        lambda m, x: m.sequence(x),
        sets("sequence", nn.Sequential(collections.OrderedDict(b=nn.Softplus(), a=nn.Tanh()))),
    ),
    "order of a module dict": (each_named, sets("named", nn.ModuleDict({"b": nn.Softplus(), "a": nn.Tanh()}))),
    # Tensors.
    "dtype of a buffer": (
        lambda m, x: x @ m.of_dtype.float(),
        does(lambda m: m.of_dtype.__setattr__("data", m.of_dtype.double())),
    ),
    "shape of a buffer": (lambda m, x: x + m.of_shape.shape[0], sets("of_shape", torch.ones(9, 8))),
    "strides of a buffer": (lambda m, x: x @ m.of_stride, sets("of_stride", torch.ones(8, 8).t())),
    "gradient of a buffer": (
        lambda m, x: x + 1 if m.of_grad.requires_grad else x,
        does(lambda m: m.of_grad.requires_grad_()),
    ),
    "memory of a buffer": (
        lambda m, x: x @ m.of_memory @ m.of_grad,
        does(lambda m: m._buffers.__setitem__("of_memory", m.of_grad.detach())),
    ),
    "buffer that is None": (lambda m, x: x if m.maybe is None else x + m.maybe, sets("maybe", None)),
    "attribute of a tensor": (lambda m, x: x * m.marked.by, does(lambda m: setattr(m.marked, "by", 3.0))),
    "tie": (lambda m, x: m.loose(m.tied(x)), does(lambda m: setattr(m.loose, "weight", m.tied.weight))),
    "tie that is undone": (each_module, does(lambda m: setattr(m.layers[1], "bias", nn.Parameter(torch.ones(8))))),
    # Functions.
    "global function": (lambda m, x: plain(x), patches(sys.modules[__name__], "plain", other)),
    "default": (lambda m, x: plain(x), patches(plain, "__defaults__", (3.0,))),
    "keyword default": (lambda m, x: plain(x), patches(plain, "__kwdefaults__", {"more": 2.0})),
    "code of a function": (lambda m, x: plain(x), patches(plain, "__code__", other.__code__)),
    "function within": (lambda m, x: with_helper(x), patches(with_helper, "__code__", with_other_helper.__code__)),
    "closure": (lambda m, x: m.handler(x), sets("handler", closing(3.0))),
    "one of two closures": (each_call, does(lambda m: m.list_of_calls.__setitem__(0, closing(4.0)))),
    "closure of a decorator": (lambda m, x: m.wrapped(x), sets("wrapped", decorated(3.0))),
    "bound method's object": (
        lambda m, x: m.method(x),
        does(lambda m: setattr(m.method.__self__, "by", 3.0)),
    ),
    "keyword of a partial": (lambda m, x: m.partial(x), sets("partial", functools.partial(plain, more=3.0))),
    "function of a partial": (lambda m, x: m.partial(x), sets("partial", functools.partial(other, more=2.0))),
    "attribute of a function": (lambda m, x: attributed(x), patches(attributed, "by", 3.0)),
    "function in a table": (lambda m, x: TABLE["act"](x), lambda m, patch: patch.setitem(TABLE, "act", torch.tanh)),
    "function of torch": (lambda m, x: F.silu(x), patches(F, "silu", F.gelu)),
    # Modules of Python.
    "global": (lambda m, x: x * NUMBER, patches(sys.modules[__name__], "NUMBER", 3.0)),
    "item of a global": (lambda m, x: x * TABLE["by"], lambda m, patch: patch.setitem(TABLE, "by", 3.0)),
    "global of another module": (lambda m, x: x * read_elsewhere.BY, patches(read_elsewhere, "BY", 3.0)),
    "global of a function elsewhere": (lambda m, x: read_elsewhere.scaled(x), patches(read_elsewhere, "INNER", 3.0)),
    "name that a module lacks": (
        lambda m, x: x + 1 if hasattr(read_elsewhere, "ABSENT") else x,
        patches(read_elsewhere, "ABSENT", 1),
    ),
    "import when it runs": (imported, patches(read_elsewhere, "LATE", 3.0)),
    "constant of torch": (lambda m, x: x * torch.gain, patches(torch, "gain", 3.0)),
    "constant of torch.nn.functional": (lambda m, x: x * F.gain, patches(F, "gain", 3.0)),
    "constant of numpy": (of_numpy, patches(np, "gain", 3.0)),
    "constant of math": (lambda m, x: x * math.tau, patches(math, "tau", 3.0)),
    "constant of string": (lambda m, x: x + len(string.digits), patches(string, "digits", "012")),
    "builtin constant": (lambda m, x: x * GAIN, patches(builtins, "GAIN", 3.0)),  # type: ignore[name-defined]  # noqa: F821
    "builtin function": (
        lambda m, x: x * divmod(7, 2)[0],
        patches(builtins, "divmod", lambda a, b: (a, b)),
    ),
    "global in a builtin's place": (
        lambda m, x: x * max((1, 2)),
        patches(sys.modules[__name__], "max", min),
    ),
    # The process.
    "length of sys.argv": (lambda m, x: x + len(sys.argv), patches(sys, "argv", ["a", "b", "c"])),
    "item of sys.argv": (lambda m, x: x + len(sys.argv[0]), patches(sys, "argv", ["other program"])),
    "switch in sys.argv": (lambda m, x: x + 1 if "--fast" in sys.argv else x, patches(sys, "argv", ["--fast"])),
    "recursion limit": (
        lambda m, x: x + sys.getrecursionlimit(),
        lambda m, patch: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    ),
    "variable": (of_environment, lambda m, patch: patch.setenv("CORE_TEST_SET", "3")),
    "variable that was absent": (of_environment, lambda m, patch: patch.setenv("CORE_TEST_ABSENT", "3")),
    "variable that is gone": (
        lambda m, x: x + len(os.getenv("CORE_TEST_GONE", "")),
        lambda m, patch: patch.delenv("CORE_TEST_GONE"),
    ),
    "variable that is looked for": (
        lambda m, x: x + 1 if "CORE_TEST_ASKED" in os.environ else x,
        lambda m, patch: patch.delenv("CORE_TEST_ASKED"),
    ),
    "variable of a composed name": (
        lambda m, x: x + len(os.environ.get(f"CORE_TEST_{'NAMED'}", "")),
        lambda m, patch: patch.setenv("CORE_TEST_NAMED", "33"),
    ),
    # Torch's switches.
    "default dtype": (
        lambda m, x: x + 1 if torch.get_default_dtype() is torch.float32 else x,
        lambda m, patch: torch.set_default_dtype(torch.float64),
    ),
    "deterministic": (
        lambda m, x: x + 1 if torch.are_deterministic_algorithms_enabled() else x,
        lambda m, patch: torch.use_deterministic_algorithms(True),
    ),
    "benchmark of cudnn": (
        lambda m, x: x + 1 if torch.backends.cudnn.benchmark else x,
        patches(torch.backends.cudnn, "benchmark", True),
    ),
    "tf32": (
        lambda m, x: x + 1 if torch.backends.cuda.matmul.allow_tf32 else x,
        lambda m, patch: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
    "device that is there": (
        lambda m, x: x + 1 if torch.cuda.is_available() else x,
        patches(torch.cuda, "is_available", lambda: True),
    ),
}


def everything() -> Everything:
    """Return a model that reads all of it, as every start makes it."""
    model = Everything(tuple(read for read, _ in PAIRS.values()))
    return model.eval()
