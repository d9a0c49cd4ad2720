"""Output of all subcommands: JSON documents, the console, progress, and errors."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from core._version import __version__
from core.errors import CoreError, UsageError, error_json, notes_of

if TYPE_CHECKING:
    from rich.console import Console

    from core.compilation.options import Progress

_PIPE_COLUMNS = 200
"""Width of tables where neither a terminal nor the variable COLUMNS says how wide they may be."""
_LONG_S = 1.0
"""How long a phase lasts at least that gets a line where there is no terminal."""


def print_json(schema: str, **fields: Any) -> None:
    """Print one JSON document to standard output; see `json_text`."""
    print(json_text(schema, **fields))


def json_text(schema: str, **fields: Any) -> str:
    """Return one JSON document, opened by its schema (docs/json.md) and the version of `core`.

    JSON has no NaN and no infinity: such a number is written as null.
    """
    return json.dumps(_strict({"schema": schema, "core": __version__, **fields}), indent=2, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console() -> Console:
    """Return a console on standard output: as wide as the terminal or COLUMNS says, else 200 columns.

    What is no terminal gets lines without the blanks that fill a table's last column.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    width = None if os.environ.get("COLUMNS", "").isdigit() else _PIPE_COLUMNS
    return Console(width=width, highlight=False, file=cast("IO[str]", _Unpadded()))


class _Unpadded:
    """Standard output, with no blanks at the ends of lines; what is written ends with a line."""

    def write(self, text: str) -> int:
        sys.stdout.write("\n".join(line.rstrip(" ") for line in text.split("\n")))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def print_items(items: Iterable[Any]) -> None:
    """Print lines and tables of `rich`; a line stays whole however long it is, unless its `no_wrap` is False.

    Brackets in a line are no markup.
    """
    out = console()
    for item in items:
        wraps = hasattr(item, "columns") or getattr(item, "no_wrap", None) is False
        out.print(item, soft_wrap=not wraps, markup=False)


_starting = ExitStack()
"""Tells of a command's start until something else is told."""


def start(*, quiet: bool) -> None:
    """Tell on standard error that torch is being imported, if this takes long; `end_start`, `status` and `loading`
    end it."""
    if not quiet:
        _starting.enter_context(phase_lines())("importing torch")


def end_start() -> None:
    """Tell no more of the start."""
    _starting.close()


@contextmanager
def status(first: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Tell on standard error what is going on; yield a function that changes the text.

    A terminal shows one line that changes; elsewhere each text that stands for over a second is a line.
    """
    end_start()
    from rich.console import Console

    terminal = Console(stderr=True)
    if quiet:
        yield lambda text: None
    elif not terminal.is_terminal:
        with phase_lines() as say:
            say(first)
            yield say
    else:
        with terminal.status(first) as shown:
            yield shown.update


@contextmanager
def phase_lines() -> Iterator[Callable[[str], None]]:
    """Yield a function that takes what is going on, and prints it to standard error if it takes over a second;
    "" ends it."""
    timer: threading.Timer | None = None

    def say(text: str) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        timer = threading.Timer(_LONG_S, lambda: print(f"core: {text}", file=sys.stderr, flush=True)) if text else None
        if timer is not None:
            timer.daemon = True
            timer.start()

    try:
        yield say
    finally:
        if timer is not None:
            timer.cancel()


def check_file(option: str, path: Path | None) -> None:
    """Refuse, before minutes of work, a file that cannot be written; `-` is standard output."""
    if path is not None and path != Path("-") and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = "it is a folder" if path.is_dir() else f"there is no folder {str(path.absolute().parent)!r}"
        raise UsageError(f"{option} {str(path)!r}", found=found, remedy="name a file in a folder that exists")


def print_warnings(warnings: tuple[str, ...]) -> None:
    """Print one line per warning to standard error."""
    for warning in warnings:
        _print_error(f"warning: {warning}")


def print_core_error(error: CoreError, *, as_json: bool, debug: bool) -> None:
    """Print an error that the user can act on."""
    if debug:
        traceback.print_exception(error)
    if as_json:
        print_json("core.error/1", error=error_json(error))
    elif not debug:
        lines = [f"error: {error}", *(f"   note: {note}" for note in notes_of(error))]
        if error.__cause__ is not None:
            lines.append("  (run with --debug for the traceback)")
        _print_error("\n".join(lines))


def _print_error(text: str) -> None:
    """Print to standard error; a terminal gets lines that break between words and go on as indented as they began."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(line, width) for line in text.splitlines())
    print(text, file=sys.stderr)


def _wrapped(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, width, subsequent_indent=f"{indent}  ", **how) or line


def print_usage_error(error: Any, *, as_json: bool) -> None:
    """Print a command-line parser's error; `error` is a click exception of whichever click typer uses."""
    if as_json:
        fields = {"asked": "the command line", "found": error.format_message(), "remedy": "see --help", "notes": []}
        print_json("core.error/1", error={"type": "UsageError", **fields})
    else:
        shown = StringIO()
        error.show(file=shown)
        _print_error(shown.getvalue().rstrip("\n"))


def print_internal_error(error: Exception, *, as_json: bool, debug: bool) -> None:
    """Print an error that is a defect of `core`."""
    if debug:
        traceback.print_exception(error)
    text = f"internal error: {type(error).__name__}: {error}"
    if as_json:
        fields = {
            "asked": "the command",
            "found": text,
            "remedy": "run with --debug and report it",
            "notes": notes_of(error),
        }
        print_json("core.error/1", error={"type": "InternalError", **fields})
    elif not debug:
        notes = [f"   note: {' '.join(note.split())}" for note in notes_of(error)]
        first = f"{' '.join(text.split())}; run with --debug for the traceback"
        _print_error("\n".join([first, *notes]))


@contextmanager
def loading(first: str, *, quiet: bool) -> Iterator[Progress]:
    """Tell of loading and capture on standard error: by a bar on a terminal, else by a line for what takes long.

    first: what is going on before anything is counted. A total of 0 means that the work is not counted.
    """
    end_start()
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        with phase_lines() as say:
            say(first)
            yield lambda what, done, total: say(_counted(what, done, total))
        return
    with Bar(console=console, transient=True, disable=quiet) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            # "capture decode[8, 8]" and "capture prefill[…]" are steps of one bar.
            stage = what.split(" ")[0] if total else what
            if stage not in tasks:
                while tasks:
                    bar.remove_task(tasks.popitem()[1])
                tasks[stage] = bar.add_task(what, total=total or None)
            bar.update(tasks[stage], description=what, completed=done, total=total or None)

        progress(first, 0, 0)
        yield progress


def _counted(what: str, done: int, total: int) -> str:
    if not total:
        return what
    return f"{what} ({done} of {total} done)" if done < total else ""
