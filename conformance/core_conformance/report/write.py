"""Reports as files: checked before a run, written whole or not at all, and read again."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from core.cli.output import json_text
from core.errors import UsageError
from core.host.distributions.installing import pip_install
from core_conformance.report.report import SCHEMA, Report

STANDARD_OUTPUT = Path("-")

# JSON first: everything else can be made from it again.
FORMS = ("--json", "--junit", "--html", "--badge", "--badge-json")
"""The forms of a report by the option that names the file, in the order in which they are written."""


def check_targets(targets: Mapping[str, Path | None]) -> None:
    """Raise `UsageError`, before a run, for a file that could not be written; `-` for `--json` is standard output.

    targets: a path by option, one of `FORMS`; None for a form that is not wanted.
    """
    seen: dict[Path, str] = {}
    for option, path in _given(targets):
        asked = f"{option} {str(path)!r}"
        if path == STANDARD_OUTPUT:
            if option == "--json":
                continue
            raise UsageError(asked, found="only --json goes to standard output", remedy="name a file")
        target = path.resolve()
        problem = _problem(target)
        if problem:
            raise UsageError(asked, found=problem, remedy="name a file in a folder that exists and can be written to")
        if target in seen:
            raise UsageError(asked, found=f"{seen[target]} names the same file", remedy="name two files")
        seen[target] = option


def write(report: Report, targets: Mapping[str, Path | None]) -> None:
    """Write the report in each form that has a path, `-` for `--json` to standard output.

    A file appears whole or not at all. Where one can't be written the others are all the same, and then `UsageError` is
    raised. targets: as for `check_targets`.
    """
    makers = _makers()
    problems = []
    for option, path in _given(targets):
        text = makers[option](report)
        if path == STANDARD_OUTPUT:
            sys.stdout.write(text)
            continue
        try:
            _write_whole(path.resolve(), text)
        except OSError as error:
            problems.append(f"{option} {str(path)!r}: {error.strerror or error}")
    if problems:
        raise UsageError("write the reports", found="; ".join(problems), remedy="name files that can be written")


def to_json_text(report: Report) -> str:
    """Return the report as one JSON document of schema core.conformance/1."""
    return json_text(SCHEMA, **report.to_json()) + "\n"


def load(path: Path) -> Report:
    """Return the report that was written as JSON to a file; raise `UsageError` for anything else."""
    asked = f"--from {str(path)!r}"
    remedy = "name a file that `core conformance --json` wrote"
    try:
        document = json_format.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(asked, found=error.strerror or str(error), remedy=remedy) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(asked, found=f"it is no JSON document: {error}", remedy=remedy) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise UsageError(asked, found=f"its schema is {schema!r}, not {SCHEMA!r}", remedy=remedy)
    problem = _invalid(document)
    if problem:
        raise UsageError(asked, found=problem, remedy=remedy)
    return Report.from_json(document)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of core.conformance/1."""
    text = files("core_conformance").joinpath("assets", "report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json_format.loads(text)
    return schema


def _invalid(document: Mapping[str, Any]) -> str:
    """Return where and how a document breaks its schema, or ""."""
    try:
        from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
        from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
    except ImportError:
        remedy = pip_install("conformance")
        raise UsageError("read a report", found="jsonschema is not installed", remedy=remedy) from None
    error = best_match(Draft202012Validator(json_schema()).iter_errors(document))
    return "" if error is None else f"{error.json_path}: {error.message[:300]}"


def _makers() -> dict[str, Callable[[Report], str]]:
    from core_conformance.report.html import to_badge, to_badge_json, to_html
    from core_conformance.report.junit import to_junit

    makers = (to_json_text, to_junit, to_html, to_badge, to_badge_json)
    return dict(zip(FORMS, makers, strict=True))


def _given(targets: Mapping[str, Path | None]) -> Iterator[tuple[str, Path]]:
    return ((option, path) for option in FORMS if (path := targets.get(option)) is not None)


def _problem(target: Path) -> str:
    """Return why a file could not be written, or ""."""
    if target.is_dir():
        return "it is a folder"
    if not target.parent.is_dir():
        return f"there is no folder {str(target.parent)!r}"
    # What is no plain file, like /dev/stdout, is written in place.
    place = target if target.exists() and not target.is_file() else target.parent
    return "" if os.access(place, os.W_OK) else f"{str(place)!r} can't be written to"


def _write_whole(target: Path, text: str) -> None:
    """Write a file under another name, then rename it: a reader sees the old one or the new one."""
    data = text.encode()
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
