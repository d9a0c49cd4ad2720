"""Settings as users write them: a mapping where a dataclass of options is meant, a list where a tuple is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from core.errors import UsageError

_T = TypeVar("_T")


def made_of(cls: type[_T], given: Any, asked: str) -> _T:
    """Return the options that were given: an instance of `cls`, or one made of a mapping of its fields.

    asked: what the user wrote, for the error. Raises `UsageError` for a name that the class does not have, naming the
    nearest, and for anything else than the two.
    """
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{asked}={given!r}",
            found=f"{type(given).__name__}, neither a core.{cls.__name__} nor a mapping of its fields",
            remedy=f"write it like {asked}=core.{cls.__name__}(…)",
        )
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    check_names(given, known, f"of core.{cls.__name__}")
    return cls(**given)


def check_names(given: Iterable[str], known: list[str], of_what: str, remedy: str = "leave it out") -> None:
    """Raise `UsageError` for the first option that is not among the known ones, with the nearest that is."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            near.sort(key=lambda each: each.split("_")[0] != str(name).split("_")[0])  # min_… is no max_…
            raise UsageError(
                f"option {name!r} {of_what}",
                found=f"known are: {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else ""),
                remedy=remedy,
            )


def tuples(options: object, *names: str) -> None:
    """Make, in place, tuples of the lists and sets that these fields of a frozen dataclass were given."""
    for name in names:
        if isinstance(value := getattr(options, name), list | set | frozenset):
            object.__setattr__(options, name, tuple(value))


def check_types(options: object, kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Raise `UsageError` for the first of these fields that holds a value of another type.

    kinds: types by field. True and False count as numbers only where bool is among these.
    """
    for name, allowed in kinds.items():
        value = getattr(options, name)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise UsageError(f"{name}={value!r}", found=f"{type(value).__name__}", remedy=f"give {wanted}")


def check_texts(options: object, *names: str) -> None:
    """Raise `UsageError` for the first of these fields that is neither None nor a tuple of texts."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, str):
            raise UsageError(f"{name}={value!r}", found="a single string", remedy=f"pass a tuple: {name}=({value!r},)")
        if value is not None and not (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
            raise UsageError(f"{name}={value!r}", found="no tuple of names", remedy=f"write it like {name}=('name',)")
