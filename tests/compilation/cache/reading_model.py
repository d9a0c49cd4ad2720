"""A model that holds whatever a model may read of Python; what it reads of that are functions given to it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

Read = Callable[[Any, Tensor], Any]


class Choice(enum.Enum):
    ONE = 1.5
    TWO = 2.5


class Pair(NamedTuple):
    first: float
    second: float


@dataclasses.dataclass
class Settings:
    by: float = 2.0


class Slots:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by


class Whole(int):
    pass


class Word(str):
    __slots__ = ()


class Falls:
    def __getattr__(self, name: str) -> float:
        if name != "by":
            raise AttributeError(name)
        return 2.0


class Called:
    by = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by

    def bound(self, x: Tensor) -> Tensor:
        return x * self.by

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * cls.by


class Meta(type):
    by = 2.0


class Made(metaclass=Meta):
    """Made in the forward; has a class within."""

    size = 2.0

    class Inner:
        by = 2.0


class Descriptor:
    by = 2.0

    def __get__(self, owner: Any, kind: type) -> float:
        return self.by


class Left:
    def side(self) -> float:
        return 2.0


class Right:
    def side(self) -> float:
        return 3.0


class Both(Left, Right):
    pass


class OtherWay(Right, Left):
    pass


class Base(nn.Module):
    inherited = 2.0
    overridden = 2.0

    @property
    def computed(self) -> float:
        return self.number * 2


def plain(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return x * by + more


def other(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return x * by - more


def with_helper(x: Tensor) -> Tensor:
    def helper(y: Tensor) -> Tensor:
        return y * 2

    return helper(x)


def with_other_helper(x: Tensor) -> Tensor:
    def helper(y: Tensor) -> Tensor:
        return y * 3

    return helper(x)


def closing(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def decorated(by: float) -> Callable[[Tensor], Tensor]:
    def decorate(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(function)
        def call(x: Tensor) -> Tensor:
            return function(x) * by

        return call

    return decorate(lambda x: x + 1)


def attributed(x: Tensor) -> Tensor:
    return x * attributed.by  # type: ignore[attr-defined,no-any-return]


attributed.by = 2.0  # type: ignore[attr-defined]


class Everything(Base):
    """Calls each reader in turn on its input."""

    factor = 2.0
    factor_2 = 2.0

    def __init__(self, readers: tuple[Read, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.readers = readers
        self.number, self.flag, self.word, self.nothing = 3, True, "one", None
        self.fraction, self.turned, self.raw, self.kind = 1.5, 2j, b"one", torch.float32
        self.part, self.steps, self.size, self.where = slice(0, 2), range(3), torch.Size((2, 3)), torch.device("cpu")
        self.several, self.listed, self.counted = (1, 2), [1.0, 2.0], [1, 2]
        self.mapped, self.asked, self.tried, self.walked = {"a": 2.0}, {"a": 1}, {"a": 1}, {"a": 2.0, "b": 3.0}
        self.members, self.frozen, self.queue = {"a", "b"}, frozenset({"a"}), collections.deque([1.0, 2.0], 2)
        self.ordered = collections.OrderedDict(a=2.0, b=3.0)
        self.nested, self.deep = types.SimpleNamespace(by=2.0), types.SimpleNamespace(inner=[{"by": 2.0}])
        self.settings, self.slots, self.falls, self.pair = Settings(), Slots(2.0), Falls(), Pair(1.0, 2.0)
        self.choice, self.whole, self.text = Choice.ONE, Whole(2), Word("one")
        self.present, self.bases, self.instance = 1, Both(), Called()
        self.handler, self.method, self.call = closing(2.0), Called().bound, Called()
        self.list_of_calls, self.wrapped = [closing(2.0), closing(3.0)], decorated(2.0)
        self.steps_of_one_name = [lambda x: x + 1, lambda x: x * 2]
        self.partial = functools.partial(plain, more=2.0)
        self.partial_args = functools.partial(torch.add, torch.ones(1), alpha=2)
        self.target = Settings()
        self.weak = weakref.ref(self.target)
        self.class_held: type = Left
        self.linear, self.hooked, self.pre_hooked = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.forwarded, self.swapped, self.dropout = nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.sequence = nn.Sequential(collections.OrderedDict(a=nn.Tanh(), b=nn.Softplus()))
        self.named = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Softplus()})
        self.norm = nn.LayerNorm(8)
        self.tied, self.loose = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.layers[1].bias = self.layers[0].bias
        for name in ("dtype", "shape", "stride", "grad", "memory"):
            self.register_buffer(f"of_{name}", torch.ones(8, 8))
        self.register_buffer("maybe", torch.ones(8))
        self.marked = nn.Parameter(torch.ones(8))
        self.marked.by = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        for read in self.readers:
            x = read(self, x)
        return x, self.handed_through

    handed_through = 7
    described = Descriptor()
    paired = ((1.0, 2.0), (3.0, 4.0))
    tabled: ClassVar = {"a": 2.0}

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2
