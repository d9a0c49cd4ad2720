"""Classes registered with an abstract one count: `isinstance` asks for them, and no member of a class tells."""

from __future__ import annotations

import abc

from core.compilation.cache.values import Texts


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> float: ...


class Round:
    pass


def test_the_text_of_an_abstract_class_changes_with_what_is_registered() -> None:
    before = Texts(frozenset()).of(Shape)
    assert Texts(frozenset()).of(Shape) == before
    Shape.register(Round)
    assert Texts(frozenset()).of(Shape) != before
