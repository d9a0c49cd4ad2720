"""Facts by path, and names for what they speak of, of which no two are alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

from core.compilation.cache.code import name_of


class Facts:
    """Facts by path. None replaces another, and each object has a name of its own. Holds every object that has one."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self._own_names: dict[int, str] = {}
        self._taken: Counter[str] = Counter()
        self._seen: list[Any] = []

    def note(self, path: str, text: str) -> None:
        """Keep a fact; beside another of the same path, in the place of none."""
        at, number = path, 1
        while self.facts.setdefault(at, text) != text:
            number += 1
            at = f"{path} ({number})"

    def own_name(self, value: Any, name: str = "") -> str:
        """Return the name of this very function, class or namespace; a second one of a name is numbered."""
        known = self._own_names.get(id(value))
        if known is None:
            known = self._own_names[id(value)] = self.numbered(name or name_of(value))
            self._seen.append(value)
        return known

    def numbered(self, name: str) -> str:
        """Return a name that was not given before."""
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} #{self._taken[name]}"
