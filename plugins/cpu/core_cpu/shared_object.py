"""Builds a graph's shared object from the C++ that AOTInductor generated for it, by processes that run meanwhile.

AOTInductor would run the compiler itself, one file after the other, and wait for each.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.common.under_way import Steps

MODEL = Path(__file__).parent / "csrc" / "model.h"
"""Stands in place of torch's headers of models and containers, which take 5 s of each graph's 7."""
_KERNELS = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
"""The line at which the kernels of a generated file begin, after the code that calls them."""
_CHECKS = "    __check_inputs_outputs(input_handles, output_handles);\n"
"""The call of checks that a variable of the environment switches on, a third of the file; `_Step.bind` checks too."""
_CALLS_LEVEL = "-O1"
"""The compiler's effort for the code that calls the kernels, as AOTInductor has it."""
_OF_CONTAINER = (
    # What comes before the declarations of kernels: headers, and the C functions of a container.
    re.compile(
        r'\A\s*(?:#include <[\w/.]+>\s+)+// Definition of AOTI runtime interface functions\n.*?\n} // extern "C"\n',
        re.S,
    ),
    # The model's constructor and more.
    re.compile(r"^namespace torch::aot_inductor {\n.*?^using namespace torch::aot_inductor;\n", re.S | re.M),
    # Code for constants, and checks of inputs and outputs.
    re.compile(r"^void AOTInductorModel::_const_run_impl\(.*?^(?=void AOTInductorModel::run_impl\()", re.S | re.M),
)
"""Parts of a generated file that a graph without constants does not need; each is in it once."""
_SIZES = re.compile(r"AOTInductorModelBase\(\d+,\s+(\d+),\s+0,")
"""The numbers of inputs and of outputs in the constructor of a model without constants."""
_THROUGH_DISPATCHER = "proxy_executor_call_function("


def build(generated: Sequence[str], target: Path) -> Steps[bool]:
    """Compile and link what AOTInductor generated (option `package_cpp_only`), and pause while the compiler runs.

    generated: the paths of its files. Returns whether torch's container is around the graph, as it holds constants or
    calls ops through the dispatcher. Raises `CppCompileError` of torch with what the compiler says.
    """
    source = next(Path(name) for name in generated if name.endswith(".wrapper.cpp"))
    flags, link_flags = (_flags(generated, f"_{name}_flags.json") for name in ("compile", "linker"))
    objects = [name for name in generated if name.endswith(".o")]
    commands = []
    files, contained = _sources(source)
    for path, effort in files:
        made = path.with_suffix(".o")
        commands.append(_command(flags, [path], made, ("-c", *effort)))
        objects.append(str(made))
    with _running(commands, source.parent) as processes:
        yield
        for process in processes:
            process.finish()
    with _running([_command(link_flags, objects, target, ())], source.parent) as processes:
        processes[0].finish()
    return contained


def _sources(source: Path) -> tuple[list[tuple[Path, tuple[str, ...]]], bool]:
    """Return the files to compile, with the options of each: the code that calls kernels, and the kernels, if any. And
    whether torch's container is in the former."""
    text = source.read_text(encoding="utf-8")
    calls, include, kernels = text.partition(_KERNELS)
    alone = _without_container(calls)
    source.write_text(alone or calls.replace(_CHECKS, "", 1), encoding="utf-8")
    found: list[tuple[Path, tuple[str, ...]]] = [(source, (_CALLS_LEVEL,))]
    if include:
        path = source.with_suffix(".kernels.cpp")
        path.write_text(include + kernels, encoding="utf-8")
        found.append((path, ()))
    return found, not alone


def _without_container(calls: str) -> str:
    """Return the code that calls the kernels, with model.h in place of torch's container; "" where it needs that one,
    or is written in another way than is known here."""
    sizes = _SIZES.search(calls)
    if sizes is None or _THROUGH_DISPATCHER in calls:
        return ""
    for part in _OF_CONTAINER:
        calls, count = part.subn("", calls)
        if count != 1:
            return ""
    code = calls.replace(_CHECKS, "", 1)
    return f'#include "{MODEL}"\n{code}\nCORE_CPU_MODEL({sizes[1]})\n'


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
