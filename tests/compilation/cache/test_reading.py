"""core/compilation/cache/reading.py and values.py, core/compilation/trace/reads.py: all that a trace reads is read
again, and nothing else.
"""

from __future__ import annotations

import builtins
import os
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compilation.cache.lookups import ABSENT
from core.compilation.cache.reading import Layouts, Reading, expressions_of
from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.cache.values import names_in
from core.compilation.trace.tracing import trace
from tests.compilation.cache import read_elsewhere, reading_pairs
from tests.compilation.cache.reading_model import Called, Everything, closing, plain
from tests.compilation.cache.reading_pairs import PAIRS, VARIABLES, everything

Again = Callable[[nn.Module], dict[str, str]]
X = torch.ones(2, 8)


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Put back the switches of the process."""
    limit = sys.getrecursionlimit()
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.setrecursionlimit(limit)


@pytest.fixture(scope="module")
def again() -> Iterator[Again]:
    """Read what one trace of a model that reads everything has read, off another model."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        places = ((nn.Linear, "gain"), (nn.Module, "drift"), (torch, "gain"), (F, "gain"), (np, "gain"))
        for place, name in (*places, (builtins, "GAIN")):
            patch.setattr(place, name, 2.0, raising=False)
        traced = trace(everything(), {"x": X})
        assert traced.reads is not None
        expressions = list(expressions_of(traced.reads, "main", hands_through=True))

        def read(model: nn.Module) -> dict[str, str]:
            reading = Reading({"main": model}, names_in(traced.code), Layouts({"main": model}))
            with torch.no_grad():
                return reading.read(expressions)

        yield read


@pytest.fixture(scope="module")
def was(again: Again) -> dict[str, str]:
    return again(everything())


def test_all_that_was_read_has_a_text(was: dict[str, str]) -> None:
    assert len(PAIRS) >= 130 and len(UNREAD) >= 30
    assert [name for name, text in was.items() if text == ABSENT] == ["environment('CORE_TEST_ABSENT')"]


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.usefixtures("_as_before")
def test_what_a_trace_reads_and_what_has_changed(
    name: str, again: Again, was: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = everything()
    PAIRS[name][1](model, monkeypatch)
    assert again(model) != was


def test_the_same_model_reads_the_same(again: Again, was: dict[str, str]) -> None:
    assert again(everything()) == was


def recoded(function: Any) -> Any:
    """Return the code of a function as it would be after edits of comments above it, in another folder."""
    return function.__code__.replace(co_firstlineno=function.__code__.co_firstlineno + 5, co_filename="/else/where.py")


def with_other_values(model: Any) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.mul_(3)


Change = Callable[[Any, pytest.MonkeyPatch], Any]
UNREAD: dict[str, Change] = {
    "the shell's last argument": lambda m, patch: patch.setenv("_", "/usr/bin/nice"),
    "a variable that is not read": lambda m, patch: patch.setenv("CORE_TEST_UNREAD", "1"),
    "a variable named like a text in the code": lambda m, patch: patch.setenv("cpu", "1"),
    "a variable named like an attribute": lambda m, patch: patch.setenv("number", "1"),
    "a variable that is gone": lambda m, patch: patch.delenv("HOME", raising=False),
    "the folder": lambda m, patch: patch.chdir("/"),
    "where modules are looked for": lambda m, patch: patch.syspath_prepend("/"),
    "values of weights": lambda m, patch: with_other_values(m),
    "an attribute of the model": lambda m, patch: setattr(m, "note_of_mine", 1),
    "an object that can't be compared": lambda m, patch: setattr(m, "generator_of_mine", torch.Generator()),
    "an attribute of a submodule": lambda m, patch: setattr(m.layers[0], "note_of_mine", 1),
    "mode of a module that does not ask": lambda m, patch: m.linear.train(),
    "a constant of the model's class": lambda m, patch: patch.setattr(Everything, "unread", 1, raising=False),
    "a method of the model's class": lambda m, patch: patch.setattr(Everything, "extra_repr", lambda self: "x"),
    "how the model is made": lambda m, patch: patch.setattr(Everything, "__init__", lambda self: None),
    "a constant of torch's class": lambda m, patch: patch.setattr(nn.Linear, "unread", 1, raising=False),
    "a global": lambda m, patch: patch.setattr(reading_pairs, "UNREAD", 1, raising=False),
    "a global elsewhere": lambda m, patch: patch.setattr(read_elsewhere, "UNREAD", 1, raising=False),
    "a function that is not called": lambda m, patch: patch.setattr(reading_pairs, "other", None),
    "a builtin": lambda m, patch: patch.setattr(builtins, "UNREAD", 1, raising=False),
    "a constant of torch": lambda m, patch: patch.setattr(torch, "unread", 1, raising=False),
    "text for readers": lambda m, patch: patch.setattr(plain, "__doc__", "Other words."),
    "annotations": lambda m, patch: patch.setattr(plain, "__annotations__", {}),
    "comments above a function": lambda m, patch: patch.setattr(plain, "__code__", recoded(plain)),
    "comments above a method": lambda m, patch: patch.setattr(Called.bound, "__code__", recoded(Called.bound)),
    "an equal function": lambda m, patch: setattr(m, "handler", closing(2.0)),
    "an equal list": lambda m, patch: setattr(m, "listed", [1.0, 2.0]),
    "a module that is imported": lambda m, patch: patch.setitem(sys.modules, "unread_of_a_test", sys),
    "random numbers": lambda m, patch: (random.random(), torch.rand(1)),
    "modules of another model": lambda m, patch: nn.Linear(8, 8).register_forward_hook(lambda *a: None),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_a_trace_does_not_read_may_change(
    name: str, again: Again, was: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = everything()
    UNREAD[name](model, monkeypatch)
    now = again(model)
    assert [(each, was[each], now[each]) for each in was if was[each] != now[each]] == []


class Holds(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor], held: Any = None) -> None:
        super().__init__()
        self.read, self.held = (read,), held

    def forward(self, x: Tensor) -> Tensor:
        return self.read[0](self, x)


def texts_of_one(model: nn.Module) -> Callable[[], dict[str, str]]:
    """Trace a model; return what reads again what the trace has read."""
    traced = trace(model.eval(), {"x": X})
    reads = traced.reads
    assert reads is not None

    def read() -> dict[str, str]:
        reading = Reading({"main": model}, names_in(traced.code), Layouts({"main": model}))
        return reading.read(expressions_of(reads, "main", hands_through=False))

    return read


@pytest.mark.parametrize(
    "read", [lambda m, x: x + len(vars(m.held)), lambda m, x: x + 1 if "more" in m.held.__dict__ else x]
)
def test_attributes_that_are_read_all_at_once(read: Callable[[Any, Tensor], Tensor]) -> None:
    model = Holds(read, types.SimpleNamespace(by=2.0))
    again = texts_of_one(model)
    was = again()
    model.held.more = 1
    assert again() != was


class Declares:
    by = 2.0

    @torch._dynamo.assume_constant_result
    def constant(self) -> float:
        return self.by


def within_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x * read_elsewhere.in_autocast()


def both_sides(m: Any, x: Tensor) -> Tensor:
    right = read_elsewhere.right()
    y = x * 3 if right else x * 5
    return y + 1 if read_elsewhere.side("left") else y


DECLARED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, Any]] = {
    "function": (lambda m, x: x * read_elsewhere.declared(1.0, times=2.0), "DECLARED", 3.0),
    "cached function": (lambda m, x: x + 1 if read_elsewhere.kept("left") else x, "SIDES", [False, True]),
    "partial beside another call of equal answer": (both_sides, "SIDES", [True, False]),
}


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # which it steps past
@pytest.mark.parametrize("name", DECLARED)
def test_functions_that_are_declared_constant_are_called_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, changed, to = DECLARED[name]
    traced = trace(Holds(read).eval(), {"x": X})
    assert traced.reads is not None
    expressions = list(expressions_of(traced.reads, "main", hands_through=True))

    def texts() -> dict[str, str]:
        model = Holds(read)
        return Reading({"main": model}, names_in(traced.code), Layouts({"main": model})).read(expressions, strict=False)

    was = texts()
    assert texts() == was
    monkeypatch.setattr(read_elsewhere, changed, to)
    assert texts() != was


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any, str]] = {
    "identity": (lambda m, x: x + id(m.held) % 2, [1], "id()"),
    "whole environment": (lambda m, x: x + len(os.environ), None, "environment"),
    "object for a key": (lambda m, x: x * len(m.held), {object(): 2.0}, "for a key"),
    "random numbers of C's": (lambda m, x: x + 1 if m.held is not None else x, random.Random(0), "can't be read"),
    "result that is declared constant": (lambda m, x: x * m.held.constant(), Declares(), "declared to be constant"),
    "copy of the declaration": (lambda m, x: x * read_elsewhere.wrapped(1.0), None, "declared to be constant"),
    "declared method": (lambda m, x: x * m.held.method(), read_elsewhere.Holding(), "declared to be constant"),
    "answer of the trace alone": (within_autocast, None, "another value now than in the trace"),
    "number of numpy": (lambda m, x: x * m.held, np.float32(2.0), "___from_numpy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_compared_is_refused_by_name(name: str) -> None:
    read, held, said = REFUSED[name]
    with pytest.raises(Uncacheable, match=re.escape(said)):
        texts_of_one(Holds(read, held))()


@pytest.mark.parametrize(
    "expression",
    ["__import__('os').system('true')", "phases['main'].eval()", "[each for each in modules]", "open('/tmp/x', 'w')"],
)
def test_an_expression_runs_nothing(expression: str) -> None:
    reading = Reading({"main": nn.Identity()}, frozenset(), Layouts({}))
    with pytest.raises(Uncacheable, match="can't be read again"):
        reading.read([expression])


class Holder(nn.Module):
    """Holds what chains of attributes and items lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"a.b": [3, {"x['y']": 4}], 0: "zero", "quote'": 5}
        self.inner = nn.Linear(2, 2)

    @property
    def fresh(self) -> list[int]:
        return [1]


@pytest.mark.parametrize(
    "expression",
    [
        "phases['main'].table['a.b'][0]",
        "phases['main'].table['a.b'][-1]",
        "phases['main'].table[0]",
        "phases['main'].table[\"quote'\"]",
        "phases['main'].table['a.b'][1][\"x['y']\"]",
        "phases['main']._modules['inner'].weight",
        "phases['main'].fresh",
        "phases['main'].fresh[0]",
        "phases['main'].missing.more",
        "phases['main'].table[7]",
        "phases['other'].table",
        "type(phases['main'].inner)",
        "hasattr(phases['main'].inner, 'weight')",
        "hasattr(phases['main'].inner, 'gain')",
        "own(phases['main'], 'table')",
        "modules['os'].sep",
        "modules['no_such_module'].sep",
    ],
)
def test_a_chain_is_what_the_parsed_expression_is(expression: str) -> None:
    """Chains, which most expressions are, are looked up without being parsed: a space makes one an expression."""
    model = Holder()

    def read(text: str) -> str:
        return Reading({"main": model}, frozenset(), Layouts({"main": model})).read([text])[text]

    parsed = read(f"{expression} ")
    found = read(expression)
    assert found == parsed


def test_beginnings_are_looked_up_once_and_ends_each_time() -> None:
    class Counting(nn.Module):
        asked = 0

        @property
        def counted(self) -> Any:
            Counting.asked += 1
            return types.SimpleNamespace(a=1, b=2)

    reading = Reading({"main": Counting()}, frozenset(), Layouts({}))
    found = reading.read(["phases['main'].counted.a", "phases['main'].counted.b"])
    assert Counting.asked == 1 and set(found.values()) == {"1", "2"}
