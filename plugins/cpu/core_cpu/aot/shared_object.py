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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from core.common.under_way import Steps
from core.errors import one_line
from core_cpu.aot.graph import require
from core_cpu.extension import refuse_replaced

MODEL = Path(__file__).parents[1] / "csrc" / "model.h"
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


@dataclass(frozen=True, slots=True)
class Built:
    """How a shared object was built."""

    #: torch's container is around the graph
    contained: bool
    #: why it is, though the graph holds no constants and calls no op through the dispatcher; "" where it does
    reason: str = ""


def build(generated: Sequence[str], target: Path, load: Callable[[Path], object]) -> Steps[Built]:
    """Compile and link what AOTInductor generated (option `package_cpp_only`), and pause while the compiler runs.

    generated: the paths of its files. load: loads a shared object without torch's container, and raises `OSError` where
    it can't be loaded. Where the code that calls the kernels can't be compiled, linked or loaded without the container,
    it is compiled once more with it. Raises `CppCompileError` of torch with what the compiler says, and `OSError` where
    the container can't be opened here.
    """
    from torch._inductor.exc import CppCompileError

    source = next(Path(name) for name in generated if name.endswith(".wrapper.cpp"))
    folder = source.parent
    flags, link_flags = (_flags(generated, f"_{name}_flags.json") for name in ("compile", "linker"))
    found = [name for name in generated if name.endswith(".o")]
    codes, kernels = _codes(source)
    made = source.with_suffix(".o")
    commands = {each.with_suffix(".o"): _command(flags, [each], each.with_suffix(".o"), ("-c",)) for each in kernels}
    link = {target: _command(link_flags, [*found, made, *commands], target, ())}
    reason = ""
    with _running(commands, folder) as others:
        for contained, code in codes:
            source.write_text(code, encoding="utf-8")
            with _running({made: _command(flags, [source], made, ("-c", _CALLS_LEVEL))}, folder) as calls:
                require(contained=contained)
                yield partial(_are_over, (*others, *calls))
                _finish(others)  # an error of theirs is none of the calls'
                try:
                    _finish(calls)
                    with _running(link, folder) as linking:
                        _finish(linking)
                    if not contained:
                        load(target)
                except (CppCompileError, OSError) as error:
                    if contained:
                        raise
                    reason = _reason(error)
                    continue
            refuse_replaced()  # after the compiler has read model.h
            return Built(contained, reason)
    raise AssertionError("the last code is the container's, which returns or raises")


def _codes(source: Path) -> tuple[list[tuple[bool, str]], list[Path]]:
    """Return the codes that call the kernels, the one to be tried first, each with whether torch's container is in it.
    And the file of the kernels, written, if there are any."""
    calls, include, kernels = source.read_text(encoding="utf-8").partition(_KERNELS)
    alone = _without_container(calls)
    codes = [*([(False, alone)] if alone else ()), (True, calls.replace(_CHECKS, "", 1))]
    if not include:
        return codes, []
    path = source.with_suffix(".kernels.cpp")
    path.write_text(include + kernels, encoding="utf-8")
    return codes, [path]


def _reason(error: Exception) -> str:
    """Return what a compiler or a loader says, in one line that is the same for graphs with the same fault."""
    text = str(error)
    found = re.search(r"\berror:.*|undefined symbol:.*", text)
    return one_line(found[0] if found else text)


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

    def __init__(self, command: Sequence[str], said: Path) -> None:
        """said: the file that takes what it says."""
        self._command = list(command)
        self._said = said
        with open(said, "wb") as file:
            self._process = subprocess.Popen(
                command, cwd=said.parent, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
            )

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

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


def _are_over(processes: Sequence[_Process]) -> bool:
    return all(process.is_over for process in processes)


def _finish(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.finish()


@contextmanager
def _running(commands: Mapping[Path, Sequence[str]], folder: Path) -> Iterator[list[_Process]]:
    """Start these commands, each given with what it writes; those that still run at the end of the block are ended.

    folder: theirs, in which they work.
    """
    processes: list[_Process] = []
    try:
        for out, command in commands.items():
            processes.append(_Process(command, folder / f"{out.name}.said.txt"))
        yield processes
    finally:
        for process in processes:
            process.end()
