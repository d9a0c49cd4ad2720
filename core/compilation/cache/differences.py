"""Says in a few lines in which factors two programs differ: causes first, possible consequences as a count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Factors = Mapping[str, Mapping[str, str]]
"""Groups of factors by name, in each group texts by name."""
_ORDER = (
    *("versions", "source", "device", "torch", "model", "inputs", "buckets", "guards", "options", "shared"),
    *("quantization", "passes", "implementations", "values"),
)
_MOST_GROUPS, _MOST_NAMES, _MOST_FILES = 6, 2, 3


_REGISTRY = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_ROOT = re.compile(r"\b(?:phases|modules)\['([^']*)'\]")


def shown(expression: str) -> str:
    """Return an expression of a trace as a reader would write it: `main.layers.0.scale`."""
    return _ROOT.sub(r"\1", _REGISTRY.sub(r".\1", expression))


@dataclass(frozen=True, slots=True)
class Difference:
    """One factor that differs; None if one side has no factor of that name."""

    group: str
    name: str
    was: str | None
    now: str | None

    def __str__(self) -> str:
        return f"{self.group}: {self.change()}"

    def change(self) -> str:
        """Return the factor with its old and its new text."""
        return f"{self.name}: {_short(self.was)} -> {_short(self.now)}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the source of a package lies, and a digest of each of its files by path."""

    folder: str
    files: Mapping[str, str]


Places = Mapping[str, Place]
"""By package."""


def differences(old: Factors, new: Factors) -> list[Difference]:
    """Return the factors that differ: groups that cause others first, within a group by name."""
    found = []
    for group in sorted({*old, *new}, key=_rank):
        was, now = old.get(group, {}), new.get(group, {})
        names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        found += [Difference(group, name, was.get(name), now.get(name)) for name in names]
    return found


def _rank(group: str) -> tuple[int, str]:
    return (_ORDER.index(group) if group in _ORDER else len(_ORDER), group)


def explain(found: Iterable[Difference], old: Places, new: Places, *, most: int = _MOST_GROUPS) -> list[str]:
    """Return one line per group, up to a limit; old, new: the folders of each side's source."""
    groups = _by_group(found)
    lines = [_line(group, each, old, new) for group, each in groups.items()]
    rest = list(groups.items())[most:]
    more = f"and {sum(len(each) for _, each in rest)} more, of {', '.join(group for group, _ in rest)}"
    return lines if not rest else [*lines[:most], more]


def brief(found: Iterable[Difference], old: Places, new: Places) -> str:
    """Return the groups that differ: versions and sources by name, a single factor by itself, else a count."""
    texts = []
    for group, each in _by_group(found).items():
        names = [item.name for item in each]
        if group == "source":
            texts += [_brief_source(name, old.get(name), new.get(name)) for name in names]
        elif group == "versions":
            texts.append(f"versions ({', '.join(each_line(names, most=3))})")
        else:
            texts.append(f"{group} {names[0]}" if len(names) == 1 else f"{group} ({len(names)})")
    return ", ".join(texts)


def each_line(lines: Sequence[str], *, most: int = 8) -> Iterator[str]:
    """Yield the first lines, and how many more there are."""
    yield from lines[:most]
    if len(lines) > most:
        yield f"and {len(lines) - most} more"


def _by_group(found: Iterable[Difference]) -> dict[str, list[Difference]]:
    groups: dict[str, list[Difference]] = {}
    for each in found:
        groups.setdefault(each.group, []).append(each)
    return groups


def _line(group: str, found: list[Difference], old: Places, new: Places) -> str:
    if group == "source":
        return "; ".join(_source(each, old.get(each.name), new.get(each.name)) for each in found)
    most = len(found) if group == "versions" else _MOST_NAMES
    return f"{group}: {', '.join(each_line([each.change() for each in found], most=most))}"


def _source(found: Difference, old: Place | None, new: Place | None) -> str:
    if old is None or new is None:
        return str(found)
    files = sorted(path for path in {*old.files, *new.files} if old.files.get(path) != new.files.get(path))
    count = "1 file differs" if len(files) == 1 else f"{len(files)} files differ"
    where = f"that entry is of {old.folder}, " if _is_elsewhere(old, new) else ""
    return f"source: {found.name}: {where}{count}: {', '.join(each_line(files, most=_MOST_FILES))}"


def _brief_source(package: str, old: Place | None, new: Place | None) -> str:
    return f"source {package}" + (f" of {old.folder}" if old is not None and _is_elsewhere(old, new) else "")


def _is_elsewhere(old: Place | None, new: Place | None) -> bool:
    return old is not None and new is not None and old.folder != new.folder


def _short(text: str | None) -> str:
    if text is None:
        return "(none)"
    text = " ".join(str(text).split())
    return text if len(text) <= 60 else f"{text[:40]}…{text[-16:]}"
