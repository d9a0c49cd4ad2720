"""Checks of values that hold for every subcommand, before it runs: text, numbers and paths that are always invalid."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core.engine.parallel.interrupts import EXIT_TERMINATED, Terminated
from core.errors import UsageError
from core.paths import local_path

_MAX_INT, _MAX_SEED = 2**31 - 1, 2**64 - 1
_SEED = "--seed"
_STDOUT = Path("-")


def check_text(arguments: Sequence[str]) -> None:
    """Raise `UsageError` for an argument that is no text: bytes that are not UTF-8, or a NUL."""
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            found = "its bytes are not UTF-8"
        else:
            if "\0" not in argument:
                continue
            found = "it holds a NUL"
        shown = ascii(argument if len(argument) <= 60 else f"{argument[:60]}...")
        raise UsageError(f"argument {number}, {shown}", found=found, remedy="pass text encoded as UTF-8")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a subcommand's function: refuse invalid values, expand `~` in paths, and answer SIGTERM by its exit code."""
    names = {name: _label(name, each.default) for name, each in inspect.signature(function).parameters.items()}

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        given = {name: _checked(names[name], value) for name, value in values.items()}
        try:
            return function(**given)
        except Terminated:  # here, since typer takes every KeyboardInterrupt for Ctrl-C
            print("core: ended by SIGTERM", file=sys.stderr)
            return EXIT_TERMINATED

    return run


def number_text(value: int) -> str:
    """Return a number's digits, or its size: Python refuses to write out the digits of very large ones."""
    return str(value) if value.bit_length() < 200 else f"a number of {value.bit_length()} bits"


def check_positive(option: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the values of an option; raise `UsageError` for one that is no size."""
    if any(not 1 <= value < 2**31 for value in values):
        raise UsageError(
            f"{option} {','.join(map(number_text, values))}",
            found="there is nothing below 1, and nothing above 2147483647",
            remedy="pass whole numbers between",
        )
    return values


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas, each once; raise `UsageError` for what is none."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise UsageError(
            f"{option} {text!r}", found="it is no list of whole numbers", remedy=f"write it like {option} 1,8,64"
        ) from None


def _label(name: str, declared: Any) -> str:
    """Return a parameter's spelling on the command line."""
    given = [each for each in getattr(declared, "param_decls", None) or () if each.startswith("--")]
    if type(declared).__name__ == "ArgumentInfo":
        return str(declared.metavar or name.upper())
    return given[0] if given else f"--{name.replace('_', '-')}"


def _checked(label: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_checked(label, each) for each in value]
    if isinstance(value, Path) and value != _STDOUT:
        return local_path(f"{label} {str(value)!r}", value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{label} {value}", found="it is no finite number", remedy="pass a finite number")
    if isinstance(value, int) and not isinstance(value, bool):
        limit = _MAX_SEED if label == _SEED else _MAX_INT
        if abs(value) > limit:
            raise UsageError(
                f"{label} {number_text(value)}", found=f"{limit} is the most", remedy="pass a smaller number"
            )
    return value
