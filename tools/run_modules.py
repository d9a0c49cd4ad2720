"""Which modules take part between `core run` and its first captured replay: those of which a function is called.

`python tools/run_modules.py CHECKOUT` runs `core run --device cpu` of that checkout, on the embedded model and with an
empty compile cache, under Python's profiler; it stops there and prints the files as JSON. It begins where the command's
own function does and ends with the first `Program.replay`. What only gets imported, and class bodies, do not count.
"""

from __future__ import annotations

import cProfile
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

_OF_A_FUNCTION = 0x1  # CO_OPTIMIZED, which the code of modules and class bodies has not
_LIMIT_S = 3600


def modules_of_a_run(root: Path) -> tuple[str, ...]:
    """Return the files that take part, relative to the checkout; raise `RuntimeError` where there is no replay."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CORE_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), str(root.resolve())]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_S)
    lines = run.stdout.splitlines()
    if run.returncode != 0 or not lines:
        raise RuntimeError(f"`core run` of {root} did not come to a replay:\n{run.stderr[-2000:]}")
    return tuple(json.loads(lines[-1]))


def files_called(profiler: cProfile.Profile, root: Path) -> list[str]:
    """Return the files below a folder of which the profiler saw a function called, relative to it."""
    codes = (entry.code for entry in profiler.getstats())
    called = (code for code in codes if isinstance(code, CodeType) and code.co_flags & _OF_A_FUNCTION)
    paths = {Path(code.co_filename) for code in called}
    return sorted(path.relative_to(root).as_posix() for path in paths if path.is_relative_to(root))


def _run(root: Path) -> None:
    sys.path[:0] = [str(root), *map(str, sorted(root.glob("plugins/*"))), str(root / "conformance")]
    import core

    if not Path(core.__file__).resolve().is_relative_to(root):
        sys.exit(f"{root} holds no package `core`; found was {core.__file__}")
    import core.cli.run

    program, profiler = core.Program, cProfile.Profile(builtins=False)

    def begun(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            profiler.enable()
            return command(*args, **kwargs)

        return run

    def end(*_: Any, **__: Any) -> NoReturn:
        profiler.disable()
        print(json.dumps(files_called(profiler, root)), flush=True)
        os._exit(0)  # the rest of the run shows nothing more

    core.cli.run.run = begun(core.cli.run.run)
    program.replay = end  # type: ignore[method-assign]
    core.cli.main(["run", "--device", "cpu", "--json"])


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
    sys.exit("the command ended without a replay")
