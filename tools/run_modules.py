"""Which modules one opens to follow `core run` to its first captured replay: those on the call stack at its landmarks.

`python tools/run_modules.py CHECKOUT` runs `core run --device cpu --lowering inline` of that checkout, on the embedded
model and with an empty compile cache, and prints the files as JSON. Landmarks are calls that every version makes: torch
builds a module, runs one, traces a frame, makes, lints or recompiles a graph; a hook is called; and `Program.replay`,
where the run is stopped.
What a module on the way calls and gets an answer from (a pass, an op's reference, the keys of the cache) is not on the
way: one reads it when one wants to know more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_OF_A_FUNCTION = 0x1  # CO_OPTIMIZED, which the code of modules and class bodies has not
_LIMIT_S = 3600


def modules_of_a_run(root: Path) -> tuple[str, ...]:
    """Return the files on the way, relative to the checkout; raise `RuntimeError` where there is no replay."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CORE_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), str(root.resolve())]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_S)
    lines = run.stdout.splitlines()
    if run.returncode != 0 or not lines:
        raise RuntimeError(f"`core run` of {root} did not come to a replay:\n{run.stderr[-2000:]}")
    return tuple(json.loads(lines[-1]))


def files_on_the_stack(frame: FrameType | None, folders: tuple[Path, ...], root: Path) -> set[str]:
    """Return the files below the folders whose functions have called this frame, relative to the root."""
    found: set[str] = set()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_flags & _OF_A_FUNCTION and any(path.is_relative_to(folder) for folder in folders):
            found.add(path.relative_to(root).as_posix())
        frame = frame.f_back
    return found


def _run(root: Path) -> None:
    sys.path[:0] = [str(root), *map(str, sorted(root.glob("plugins/*"))), str(root / "conformance")]
    import core

    if not Path(core.__file__).resolve().is_relative_to(root):
        sys.exit(f"{root} holds no package `core`; found was {core.__file__}")
    import pluggy
    import torch
    import torch._dynamo.convert_frame

    import core.cli

    folders, seen = (root / "core", root / "plugins"), set[str]()
    functions: tuple[Any, ...] = (
        pluggy.HookCaller.__call__,
        torch.nn.Module.__init__,
        torch.nn.Module._call_impl,
        torch.fx.GraphModule.__init__,
        torch.fx.GraphModule.recompile,
        torch.fx.Graph.lint,
        torch.fx.Graph.eliminate_dead_code,
        torch._dynamo.convert_frame._compile,
    )
    landmarks = {function.__code__ for function in functions}

    # A profiler, as Dynamo would trace wrappers of these functions.
    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in landmarks:
            seen.update(files_on_the_stack(frame, folders, root))

    def end(*_: Any, **__: Any) -> NoReturn:
        sys.setprofile(None)
        print(json.dumps(sorted(seen | files_on_the_stack(sys._getframe(1), folders, root) | {replay})), flush=True)
        os._exit(0)  # the rest of the run shows nothing more

    replay = Path(core.Program.replay.__code__.co_filename).relative_to(root).as_posix()
    threading.setprofile(look)
    sys.setprofile(look)
    for name in {"replay", "_replay"} & vars(core.Program).keys():  # what callers use, and what staged steps do
        setattr(core.Program, name, end)
    core.cli.main(["run", "--device", "cpu", "--lowering", "inline", "--json"])


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
    sys.exit("the command ended without a replay")
