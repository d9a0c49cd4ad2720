"""Tells what an environment lacks of a peer's requirements, by metadata alone: nothing is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement


def lacking(requires: Sequence[str]) -> list[str]:
    """Return what is not met, each as `NAME is not installed` or `NAME is VERSION, not SPECIFIER`."""
    return [problem for each in requires if (problem := _problem(Requirement(each)))]


def versions(requires: Sequence[str]) -> dict[str, str]:
    """Return the installed versions by name, what is not installed left out."""
    found = {name: _version(name) for name in dict.fromkeys(Requirement(each).name for each in requires)}
    return {name: known for name, known in found.items() if known is not None}


def _problem(requirement: Requirement) -> str:
    found = _version(requirement.name)
    if found is None:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(found, prereleases=True)
    return "" if fits else f"{requirement.name} is {found}, not {requirement.specifier}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
