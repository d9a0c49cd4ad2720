"""Expected failures, in a file of the vendor's repository: which cases may fail, why, and up to which version.

    schema = "core.xfail/1"

    [[expected]]
    case = "ops/attention/*"
    reason = "rows beyond the window are read"
    until = "1.4"
    issue = "https://…"

A listed case that fails is reported as xfail, one that passes as xpass, which fails the run: the entry must go. From
version `until` of the plugin on, the entry no longer excuses anything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from core.errors import UsageError
from core_conformance.outcome import Outcome

SCHEMA = "core.xfail/1"

_FAILED = frozenset({"fail", "crash", "timeout"})
_REQUIRED = ("case", "reason", "until")
_KNOWN = (*_REQUIRED, "issue")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """One entry."""

    #: An id or a glob.
    case: str
    reason: str
    #: The plugin's version from which the failure counts again.
    until: str
    issue: str = ""

    def expired(self, plugin_version: str) -> bool:
        """Return whether the plugin has reached `until`; one whose version is no version has not."""
        try:
            return Version(plugin_version) >= Version(self.until)
        except InvalidVersion:
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectations:
    """The entries of one file, in its order; where several name a case, one that has not expired counts."""

    file: str = ""
    entries: tuple[Expectation, ...] = field(default=())

    @classmethod
    def load(cls, path: Path) -> Expectations:
        """Read a file of schema core.xfail/1; raise `UsageError` naming file, entry and remedy."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _refused(path, f"it cannot be read: {error.strerror}", "give the path of an existing file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise _refused(path, f"it is not valid TOML: {error}", "mend it at that place") from error
        if document.get("schema") != SCHEMA:
            found = f"its schema is {document['schema']!r}" if "schema" in document else "it states no schema"
            raise _refused(path, found, f'begin it with schema = "{SCHEMA}"')
        unknown = sorted(document.keys() - {"schema", "expected"})
        if unknown:
            found = f"it has unknown keys: {', '.join(unknown)}{_closest(unknown[0], ('expected',))}"
            raise _refused(path, found, "write each entry below a line [[expected]]")
        entries = document.get("expected", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _refused(path, "expected is no list of tables", "write each entry below a line [[expected]]")
        return cls(file=str(path), entries=tuple(_entry(path, n, entry) for n, entry in enumerate(entries, start=1)))

    def check(self, ids: Iterable[str]) -> None:
        """Raise `UsageError` for an entry that names no case. ids: of all cases, whether chosen for this run or not."""
        known = list(ids)
        for number, entry in enumerate(self.entries, start=1):
            if not any(matches(entry.case, id) for id in known):
                raise _refused(
                    Path(self.file),
                    f"entry {number} names case {entry.case!r}, which does not exist{_closest(entry.case, known)}",
                    "correct the entry or remove it; `core conformance --list` shows the cases",
                )

    def judge(self, outcome: Outcome, plugin_version: str) -> Outcome:
        """Return the outcome as the entries make it: xfail, xpass, a failure whose excuse has expired, or unchanged."""
        listed = [entry for entry in self.entries if matches(entry.case, outcome.id)]
        if not listed or outcome.status not in {*_FAILED, "pass"}:
            return outcome
        entry = min(listed, key=lambda item: item.expired(plugin_version))
        if outcome.status == "pass":
            reason = f"passes, and {self.file} expects it to fail ({entry.reason}): remove the entry {entry.case!r}"
            return replace(outcome, status="xpass", reason=reason)
        if entry.expired(plugin_version):
            expired = f"expected to fail until version {entry.until} of the plugin, which is {plugin_version}"
            return replace(outcome, reason=f"{outcome.reason} ({expired})")
        note = f"expected until version {entry.until}: {entry.reason}" + (f" ({entry.issue})" if entry.issue else "")
        # What the vendor knows comes first; what was found stays with it, since it may be something new.
        return replace(outcome, status="xfail", reason=f"{note}; found: {outcome.reason}")


def matches(glob: str, id: str) -> bool:
    """Return whether a glob, or an id as it is, names a case; `*` goes across slashes, upper and lower case differ."""
    return glob == id or fnmatchcase(id, glob)


def _entry(path: Path, number: int, fields: Mapping[str, Any]) -> Expectation:
    where = f"entry {number}" + (f" ({fields['case']!r})" if isinstance(fields.get("case"), str) else "")
    for name in _REQUIRED:
        if name not in fields:
            raise _refused(path, f"{where} has no {name!r}", f'add {name} = "…"')
    unknown = sorted(fields.keys() - set(_KNOWN))
    if unknown:
        found = f"{where} has an unknown key {unknown[0]!r}{_closest(unknown[0], _KNOWN)}"
        raise _refused(path, found, f"an entry has: {', '.join(_KNOWN)}")
    for name, value in fields.items():
        if not isinstance(value, str) or not value.strip():
            raise _refused(path, f"{where} has {name} = {value!r}, which is no text", f'write {name} = "…"')
    try:
        Version(fields["until"])
    except InvalidVersion as error:
        found = f"{where} has until = {fields['until']!r}, which is no version"
        raise _refused(path, found, 'write the version of the plugin that mends it, such as until = "1.4"') from error
    return Expectation(**fields)


def _closest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _refused(path: Path, found: str, remedy: str) -> UsageError:
    return UsageError(f"expected failures in {str(path)!r}", found=found, remedy=remedy)
