"""Builds a graph's shared object from the C++ that AOTInductor generated for it, by processes that run meanwhile.

AOTInductor would run the compiler itself, one file after the other, and wait for each.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.common.under_way import Steps

_KERNELS = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
"""The line at which the kernels of a generated file begin, after the code that calls them."""
_CHECKS = "    __check_inputs_outputs(input_handles, output_handles);\n"
"""The call of checks that a variable of the environment switches on, a third of the file; `_Step.bind` checks too."""
_CALLS_LEVEL = "-O1"
"""The compiler's effort for the code that calls the kernels, as AOTInductor has it."""


def build(generated: Sequence[str], target: Path) -> Steps[None]:
    """Compile and link what AOTInductor generated (option `package_cpp_only`), and pause while the compiler runs.

    generated: the paths of its files. Raises `CppCompileError` of torch with what the compiler says.
    """
    source = next(Path(name) for name in generated if name.endswith(".wrapper.cpp"))
    flags, link_flags = (_flags(generated, f"_{name}_flags.json") for name in ("compile", "linker"))
    objects = [name for name in generated if name.endswith(".o")]
    commands = []
    for path, effort in _sources(source):
        made = path.with_suffix(".o")
        commands.append(_command(flags, [path], made, ("-c", *effort)))
        objects.append(str(made))
    with _running(commands, source.parent) as processes:
        yield
        for process in processes:
            process.finish()
    with _running([_command(link_flags, objects, target, ())], source.parent) as processes:
        processes[0].finish()


def _sources(source: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the files to compile, with the options of each: the code that calls kernels, and the kernels, if any."""
    text = source.read_text(encoding="utf-8").replace(_CHECKS, "", 1)
    calls, include, kernels = text.partition(_KERNELS)
    source.write_text(calls, encoding="utf-8")
    found: list[tuple[Path, tuple[str, ...]]] = [(source, (_CALLS_LEVEL,))]
    if include:
        path = source.with_suffix(".kernels.cpp")
        path.write_text(include + kernels, encoding="utf-8")
        found.append((path, ()))
    return found


def _flags(generated: Sequence[str], ending: str) -> Mapping[str, Any]:
    path = next(name for name in generated if name.endswith(ending))
    return dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _command(flags: Mapping[str, Any], sources: Sequence[Any], out: Path, more: Sequence[str]) -> list[str]:
    """Return a command of the compiler; flags: as torch's `BuildOptionsBase.save_flags_to_json` writes them."""
    return [
        *shlex.split(flags["compiler"]),
        *map(str, sources),
        *(f"-D{name.strip()}" for name in flags["definitions"]),
        *(f"-{flag}" for flag in flags["cflags"]),
        *more,
        *(f"-I{folder}" for folder in flags["include_dirs"]),
        *(each for argument in flags["passthrough_args"] for each in shlex.split(argument)),
        *("-o", str(out)),
        *(f"-{flag}" for flag in flags["ldflags"]),
        *(f"-l{library}" for library in flags["libraries"]),
        *(f"-L{folder}" for folder in flags["libraries_dirs"]),
    ]


class _Process:
    """A run of the compiler, in a group of its own: it starts others."""

    def __init__(self, command: Sequence[str], folder: Path, number: int) -> None:
        self._command = list(command)
        self._said = folder / f"said-{number}.txt"
        with open(self._said, "wb") as said:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, process_group=0
            )

    def finish(self) -> None:
        """Wait for its end; raise `CppCompileError` where it failed."""
        if self._process.wait():
            from torch._inductor.exc import CppCompileError

            raise CppCompileError(self._command, self._said.read_text(encoding="utf-8", errors="replace"))

    def end(self) -> None:
        """End it with all that it has started, if it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)  # at which it removes its temporary files
            self._process.wait()


@contextmanager
def _running(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[list[_Process]]:
    """Start these commands; those that still run at the end of the block are ended."""
    processes: list[_Process] = []
    try:
        for number, command in enumerate(commands):
            processes.append(_Process(command, folder, number))
        yield processes
    finally:
        for process in processes:
            process.end()
