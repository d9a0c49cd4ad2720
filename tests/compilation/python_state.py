"""Models that keep state in Python, one for each form of it that a graph could freeze."""

from __future__ import annotations

import array
import collections
import contextvars
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Forward = Callable[[Any, Tensor], Tensor]
N = 0


class Held:
    """A plain object with attributes."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Box:
    """Whose attribute is state of the class."""

    n = 0


class Slotted:
    """Has no `__dict__`."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Model(nn.Module):
    """Runs a given forward over given attributes."""

    def __init__(self, forward: Forward, **held: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._run = forward
        self.__dict__.update(held)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x * self.weight)


def _plain(s: Any, x: Tensor) -> Tensor:
    s.box.n += 1
    return x * s.box.n


def _nested(s: Any, x: Tensor) -> Tensor:
    s.cfg.inner.n += 1
    return x * s.cfg.inner.n


def _in_dict(s: Any, x: Tensor) -> Tensor:
    s.d["n"] += 1
    return x * s.d["n"]


def _deep_dict(s: Any, x: Tensor) -> Tensor:
    s.d["a"]["n"] += 1
    return x * s.d["a"]["n"]


def _in_list(s: Any, x: Tensor) -> Tensor:
    s.l[0] += 1
    return x * s.l[0]


def _object_in_list(s: Any, x: Tensor) -> Tensor:
    s.l[0].n += 1
    return x * s.l[0].n


def _class_attribute(s: Any, x: Tensor) -> Tensor:
    Box.n += 1
    return x * Box.n


def _global(s: Any, x: Tensor) -> Tensor:
    global N
    N += 1
    return x * N


def _iterator(s: Any, x: Tensor) -> Tensor:
    return x * (next(s.it) + 1)


def _flag(s: Any, x: Tensor) -> Tensor:
    if not s.box.ready:
        s.box.ready = True
        return x * 10
    return x


def _module_attribute(s: Any, x: Tensor) -> Tensor:
    s.calls = s.calls + 1
    return x * s.calls


def _held_tensor(s: Any, x: Tensor) -> Tensor:
    s.box.t = s.box.t + x
    return s.box.t * 2


def _deque(s: Any, x: Tensor) -> Tensor:
    s.held.append(1)
    return x * len(s.held)


def _set(s: Any, x: Tensor) -> Tensor:
    s.held.add(len(s.held))
    return x * len(s.held)


def _counter(s: Any, x: Tensor) -> Tensor:
    s.held["a"] += 1
    return x * s.held["a"]


def _thread_local(s: Any, x: Tensor) -> Tensor:
    s.held.n += 1
    return x * s.held.n


def _python_random(s: Any, x: Tensor) -> Tensor:
    return x * s.held.random()


def _global_random(s: Any, x: Tensor) -> Tensor:
    return x * random.random()


def _numpy_random(s: Any, x: Tensor) -> Tensor:
    return x * float(s.held.random())


def _array_in_place(s: Any, x: Tensor) -> Tensor:
    s.held[0] += 1
    return x * torch.from_numpy(s.held)


def _array_assigned(s: Any, x: Tensor) -> Tensor:
    s.held = s.held + 1
    return x * torch.from_numpy(s.held)


def _next(s: Any, x: Tensor) -> Tensor:
    return x * next(s.held)


def _bytes(s: Any, x: Tensor) -> Tensor:
    s.held[0] += 1
    return x * s.held[0]


def _new_attribute(s: Any, x: Tensor) -> Tensor:
    s.calls = getattr(s, "calls", 0) + 1
    return x * s.calls


def _new_item(s: Any, x: Tensor) -> Tensor:
    s.held["n"] = s.held.get("n", 0) + 1
    return x * s.held["n"]


def _new_tensor(s: Any, x: Tensor) -> Tensor:
    if "last" not in s.held:
        s.held["last"] = x + 1
        return x * 3
    return x * s.held["last"]


def _new_buffer(s: Any, x: Tensor) -> Tensor:
    if "sums" not in s._buffers:
        s._buffers["sums"] = torch.ones(2)
        return x * 3
    return x + s._buffers["sums"]


def _deleted(s: Any, x: Tensor) -> Tensor:
    if hasattr(s.box, "odd"):
        del s.box.odd
        return x * 2
    s.box.odd = True
    return x * 3


def _order(s: Any, x: Tensor) -> Tensor:
    first = next(iter(s.held))
    s.held[first] = s.held.pop(first)
    return x * next(iter(s.held.values()))


def _order_of_ordered(s: Any, x: Tensor) -> Tensor:
    s.held.move_to_end(next(iter(s.held)))
    return x * next(iter(s.held.values()))


def _on_a_parameter(s: Any, x: Tensor) -> Tensor:
    s.weight.calls = getattr(s.weight, "calls", 0) + 1
    return x * s.weight.calls


def _context_variable(s: Any, x: Tensor) -> Tensor:
    s.held.set(s.held.get() + 1)
    return x * s.held.get()


def _context_variable_of(value: int) -> contextvars.ContextVar[int]:
    found = contextvars.ContextVar[int]("held")
    found.set(value)
    return found


def _closing_over_a_list() -> Callable[[Tensor], Tensor]:
    state = [0]

    def forward(x: Tensor) -> Tensor:
        state[0] += 1
        return x * state[0]

    return forward


def _closing_over_an_object() -> Callable[[Tensor], Tensor]:
    state = Held(n=0)

    def forward(x: Tensor) -> Tensor:
        state.n += 1
        return x * state.n

    return forward


def _nonlocal() -> Callable[[Tensor], Tensor]:
    n = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * n

    return forward


def _with_class() -> Model:
    Box.n = 0
    return Model(_class_attribute)


def _with_global() -> Model:
    global N
    N = 0
    return Model(_global)


def _with_local() -> Model:
    held = threading.local()
    held.n = 0
    return Model(_thread_local, held=held)


def _with_global_random() -> Model:
    random.seed(5)
    return Model(_global_random)


FORMS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "attribute of a plain object": lambda: Model(_plain, box=Held(n=0)),
    "attribute of an object with slots": lambda: Model(_plain, box=Slotted()),
    "attribute of an object in an object": lambda: Model(_nested, cfg=Held(inner=Held(n=0))),
    "int in a dict attribute": lambda: Model(_in_dict, d={"n": 0}),
    "int in a dict in a dict": lambda: Model(_deep_dict, d={"a": {"n": 0}}),
    "int in a list attribute": lambda: Model(_in_list, l=[0]),
    "object in a list attribute": lambda: Model(_object_in_list, l=[Held(n=0)]),
    "class attribute": _with_class,
    "global": _with_global,
    "itertools.count": lambda: Model(_iterator, it=itertools.count()),
    "flag of a plain object": lambda: Model(_flag, box=Held(ready=False)),
    "function closing over a list": _closing_over_a_list,
    "function closing over an object": _closing_over_an_object,
    "function with nonlocal": _nonlocal,
    "attribute of the module": lambda: Model(_module_attribute, calls=0),
    "tensor held by an object": lambda: Model(_held_tensor, box=Held(t=torch.zeros(2))),
    "deque": lambda: Model(_deque, held=collections.deque()),
    "set": lambda: Model(_set, held=set()),
    "Counter": lambda: Model(_counter, held=collections.Counter()),
    "defaultdict": lambda: Model(_counter, held=collections.defaultdict(int)),
    "threading.local": _with_local,
    "list iterator": lambda: Model(_next, held=iter([1, 2, 3, 4, 5, 6, 7, 8])),
    "generator": lambda: Model(_next, held=(i for i in range(1, 9))),
    "bytearray": lambda: Model(_bytes, held=bytearray(2)),
    "array.array": lambda: Model(_bytes, held=array.array("i", [0])),
    "context variable": lambda: Model(_context_variable, held=_context_variable_of(0)),
    "attribute that was not there": lambda: Model(_new_attribute),
    "attribute of a parameter": lambda: Model(_on_a_parameter),
    "attribute that comes and goes": lambda: Model(_deleted, box=Held()),
    "item that was not there": lambda: Model(_new_item, held={}),
    "tensor kept at the first call": lambda: Model(_new_tensor, held={}),
    "buffer made at the first call": lambda: Model(_new_buffer),
    "order of a dict": lambda: Model(_order, held={"a": 1, "b": 2, "c": 3}),
    "order of an OrderedDict": lambda: Model(_order_of_ordered, held=collections.OrderedDict(a=1, b=2, c=3)),
    "random.Random": lambda: Model(_python_random, held=random.Random(0)),
    "random.random": _with_global_random,
    "numpy generator": lambda: Model(_numpy_random, held=np.random.default_rng(0)),
    "numpy array written in place": lambda: Model(_array_in_place, held=np.ones(2, np.float32)),
    "numpy array assigned": lambda: Model(_array_assigned, held=np.ones(2, np.float32)),
}


def outputs(run: Callable[..., Tensor], times: int = 5) -> list[list[float]]:
    """Return what calls one after the other give."""
    with torch.no_grad():
        return [run(x=torch.ones(2)).tolist() for _ in range(times)]


COUNTED = (
    *("attribute of a plain object", "attribute of an object with slots", "attribute of an object in an object"),
    *("object in a list attribute", "function closing over an object", "attribute of the module", "threading.local"),
)
"""Forms that a program without graphs of a device counts on: integer attributes."""


class Places(nn.Module):
    """A model with states at places drawn by chance; a forward reads each and changes some."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = nn.ModuleList(nn.Module() for _ in range(2))
        self.steps = [self._place(draw, index) for index in range(draw.randint(1, 4))]

    def _place(self, draw: random.Random, index: int) -> tuple[Callable[[], int], Callable[[int], None], str]:
        """Return how to read and write a number at the end of a chain of containers, and how a forward uses it."""
        home: Any = draw.choice([self, self.inner[0], self.inner[1]])
        name = f"held{index}"
        kind = draw.choice(["object", "dict", "list", "cell"])
        leaf, read, write = _leaf(kind, draw.randint(0, 3))
        for _ in range(draw.randint(0, 2)):
            leaf = draw.choice([{"in": leaf}, [leaf], (leaf,), Held(inner=leaf)])
        setattr(home, name, leaf)
        return read, write, draw.choice(["read", "write", "read then write", "write once", "write the same"])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for read, write, use in self.steps:
            if use == "read":
                x = x + read()
            elif use == "write":
                write(read() + 1)
            elif use == "read then write":
                x = x * 0.5 + read()
                write(read() + 1)
            elif use == "write once":
                if read() < 5:
                    write(7)
                    x = x + 100
            else:
                write(read())
                x = x - read()
        return x


def _leaf(kind: str, start: int) -> tuple[Any, Callable[[], int], Callable[[int], None]]:
    """Return a container of a number, and how to read and write the number."""
    if kind == "cell":
        number = start

        def write(value: int) -> None:
            nonlocal number
            number = value

        return write, lambda: number, write
    if kind == "object":
        box = Held(n=start)
        return box, lambda: box.n, lambda value: setattr(box, "n", value)
    held: Any = {"n": start} if kind == "dict" else [start]
    at = "n" if kind == "dict" else 0
    return held, lambda: held[at], lambda value: held.__setitem__(at, value)


def states(model: Places) -> Iterator[int]:
    """Yield the numbers that a model keeps."""
    return (read() for read, _, _ in model.steps)
