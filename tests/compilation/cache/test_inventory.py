"""core/compilation/cache/inventory.py: two models that compute different things never count as one, equal ones always
do.
"""

from __future__ import annotations

import collections
import enum
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compilation.cache.inventory import Inventory

VARIABLE = "CORE_TEST_OF_THE_INVENTORY"


def read(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    found = Inventory({"main": model})
    assert not found.refusals
    return found.facts, found.code


class Holder(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


class Chain(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for each in self.calls:
            x = each(x)
        return x


class Read(Holder):
    def forward(self, x: Tensor) -> Any:
        return x * self.held.by + self.held["a"] + self.held.value if self.held == "1" else x


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def defaulted(by: float) -> Callable[..., Tensor]:
    return lambda x, by=by: x * by


def hooked(*by: float) -> nn.Module:
    def make(number: float) -> Callable[..., Tensor]:
        return lambda module, args, output: output * number

    model = nn.Sequential(*(nn.Identity() for _ in by))
    for module, number in zip(model, by, strict=True):
        module.register_forward_hook(make(number))
    return model


def module_class(by: float) -> type[nn.Module]:
    class Made(nn.Module):
        factor = by

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    return Made


def with_attribute(value: Any) -> nn.Module:
    class Made(nn.Module):
        attribute = value

        def forward(self, x: Tensor) -> Any:
            return x, self.attribute.by

    return Made()


def with_numbered(value: float) -> nn.Module:
    class Made(nn.Module):
        factor_0 = value

        def forward(self, x: Tensor, index: int = 0) -> Any:
            return x * getattr(self, f"factor_{index}")

    return Made()


class First:
    by = 2.0


class Second:
    by = 3.0


def plus(x: Tensor) -> Tensor:
    return x + 1


def in_order(*classes: type) -> nn.Module:
    """Return a model that holds both classes, and a third that takes from them in this order."""

    class Left:
        def by(self) -> float:
            return 2.0

    class Right:
        def by(self) -> float:
            return 3.0

    bases = {First: Left, Second: Right}
    made = type("Both", tuple(bases[each] for each in classes), {"__module__": __name__})
    return Read(held=made(), left=Left(), right=Right())


def subclassed(kind: type, value: Any, by: float) -> Any:
    made = type("Made", (kind,), {"__module__": __name__})(value)
    made.by = by
    return made


def enumerated(value: float) -> enum.Enum:
    return enum.Enum("Choice", {"ONE": value}, module=__name__).ONE  # type: ignore[attr-defined,no-any-return]


def cast(dtype: torch.dtype) -> nn.Module:
    class Made(nn.Module):
        @torch.autocast("cpu", dtype=dtype)
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    return Made()


def local(by: float) -> threading.local:
    made = threading.local()
    made.by = by
    return made


def namespace(by: float) -> types.ModuleType:
    made = types.ModuleType("some_configuration")
    made.by = by  # type: ignore[attr-defined]
    return made


def ordered(names: str) -> nn.Module:
    kinds = {"a": nn.Tanh, "b": nn.Softplus}
    return nn.Sequential(collections.OrderedDict((name, kinds[name]()) for name in names))


TWO = {"a": 2.0, "b": 3.0}
PAIRS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "which function stands at a place again": (lambda third: Chain(calls=[F.silu, F.relu6, third]), F.silu, F.relu6),
    "order of functions of one name": (
        lambda step: Chain(calls=[lambda x: x + 1, lambda x: x * 2][::step]),
        *(1, -1),
    ),
    "closures of functions of one name": (lambda by: Chain(calls=[scaled(by), scaled(3.0)]), 2.0, 5.0),
    "defaults of functions of one name": (lambda by: Chain(calls=[defaulted(by), defaulted(3.0)]), 2.0, 5.0),
    "hooks of one name": (lambda by: hooked(by, 3.0), 2.0, 5.0),
    "classes of one name": (lambda by: nn.Sequential(module_class(by)(), module_class(3.0)()), 2.0, 5.0),
    "which class": (lambda held: Read(both=[First, Second], held=held), First, Second),
    "order of bases": (lambda bases: in_order(*bases), (First, Second), (Second, First)),
    "order of a dict": (lambda names: Read(held={name: TWO[name] for name in names}), "ab", "ba"),
    "order of modules": (ordered, "ab", "ba"),
    "text or number": (lambda held: Read(held=held), 1, "1"),
    "text or None": (lambda held: Read(held=held), None, "None"),
    "dtype of a class": (with_attribute, torch.float16, torch.bfloat16),
    "partial of a class": (lambda kind: with_attribute(functools.partial(F.gelu, approximate=kind)), "none", "tanh"),
    "built-in function of a class": (lambda call: with_attribute(staticmethod(call)), torch.relu, torch.tanh),
    "class of a class": (with_attribute, First, Second),
    "plain attribute of a class, by a composed name": (with_numbered, 2.0, 3.0),
    "value of an enum": (lambda value: Read(held=enumerated(value)), 2.0, 3.0),
    "attribute of a list": (lambda by: Read(held=subclassed(list, [1], by)), 2.0, 3.0),
    "attribute of a number": (lambda by: Read(held=subclassed(float, 1.0, by)), 2.0, 3.0),
    "longest deque": (lambda most: Read(held=collections.deque([1], most)), 2, 3),
    "attribute that is named like hooks": (
        lambda names: Read(my_hooks={name: TWO[name] for name in names}),
        "ab",
        "ba",
    ),
    "method of a dict": (lambda by: Chain(calls=[{"x": by}.get]), 2.0, 3.0),
    "argument of a decorator of torch": (cast, torch.float16, torch.bfloat16),
    "thread's own value": (lambda by: Read(held=local(by)), 2.0, 3.0),
    "value in a module": (lambda by: Read(held=namespace(by)), 2.0, 3.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_that_python_reads_is_lost(name: str) -> None:
    make, first, other = PAIRS[name]
    assert read(make(first)) == read(make(first))
    assert read(make(first)) != read(make(other))


@pytest.mark.parametrize(
    ("module", "same"), [("transformers.utils.import_utils", True), ("transformers.utils.import_utilities", False)]
)
def test_which_distributions_have_a_package_is_in_no_order(module: str, same: bool) -> None:
    def knows(found: dict[str, list[str]]) -> dict[str, str]:
        space = {"__name__": module, "PACKAGE_DISTRIBUTION_MAPPING": found}
        exec("def call(x):\n    return x if 'a' in PACKAGE_DISTRIBUTION_MAPPING else -x\n", space)
        return read(space["call"])[0]

    assert (knows({"a": ["x", "y"], "b": []}) == knows({"b": [], "a": ["y", "x"]})) is same
    assert knows({"a": []}) != knows({"b": []})


@pytest.fixture
def _variable() -> Iterator[None]:
    yield
    os.environ.pop(VARIABLE, None)
    os.environ.pop(VARIABLE.lower(), None)


@pytest.mark.parametrize("name", [VARIABLE, VARIABLE.lower()])
@pytest.mark.usefixtures("_variable")
def test_variables_named_elsewhere_than_in_the_function_count(name: str) -> None:
    class Asks(Holder):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if os.environ.get(self.name) else x

    before = read(Asks(name=name))
    os.environ[name] = "1"
    assert read(Asks(name=name)) != before
    assert read(plus) == read(plus) and not any(VARIABLE in each for each in read(plus)[0])


def test_what_was_put_into_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.ReLU, x: Tensor) -> Tensor:
        return x * 7

    def own(x: Tensor, inplace: bool = False) -> Tensor:
        return x * 7

    before = read(nn.ReLU())
    with monkeypatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", forward)
        assert read(nn.ReLU()) != before
    for place, name in ((F, "relu"), (torch.Tensor, "relu")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, own)
            assert read(nn.ReLU()) != before
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 3)
    try:
        assert read(nn.ReLU()) != before
    finally:
        handle.remove()
    assert read(nn.ReLU()) == before


MODULE = """
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        from .configuration import SCALE
        return x * SCALE
"""


def test_a_value_that_a_function_imports_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_a_test"
    package.mkdir()
    for name, text in (("__init__", ""), ("configuration", "SCALE = 2.0\n"), ("model", MODULE)):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = __import__("package_of_a_test.model").model.Model()
    full = "package_of_a_test.configuration"
    assert full in Inventory({"main": model}).unloaded
    configuration = __import__(full).configuration
    before = read(model)
    assert full not in Inventory({"main": model}).unloaded
    monkeypatch.setattr(configuration, "SCALE", 3.0)
    assert read(model) != before
    for name in [name for name in sys.modules if name.startswith("package_of_a_test")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_stand_in_for_a_module_is_not_made_to_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{name} is asked for before the package is loaded")

    text = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        import lazy_of_a_test\n"
    (tmp_path / "model_of_a_test.py").write_text(f"{text}        return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = __import__("model_of_a_test").Model()
    assert "lazy_of_a_test" in Inventory({"main": model}).unloaded
    before = read(model)
    monkeypatch.setitem(sys.modules, "lazy_of_a_test", Lazy())  # type: ignore[arg-type]
    assert "lazy_of_a_test" not in Inventory({"main": model}).unloaded
    assert read(model) != before
    monkeypatch.delitem(sys.modules, "model_of_a_test")


def test_a_mapping_is_read_without_its_own_methods() -> None:
    class Lazy(dict[str, float]):
        def items(self) -> Any:
            raise AssertionError("this would load what nobody asked for")

    assert read(Read(held=Lazy(a=2.0))) != read(Read(held=Lazy(a=3.0)))
