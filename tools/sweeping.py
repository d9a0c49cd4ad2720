"""What the sweeps over model types share: a worker process, restarted when lost, and results in JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Result = dict[str, Any]


class Worker:
    """A process that runs one model type after the other; started on first use and again after it was lost.

    command: starts a process that calls `serve`.
    """

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._command = [sys.executable, *command]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def run(self, model_type: str) -> Result:
        """Return the result of one type; a crash or a time-out is a result too."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{model_type}\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            answered = bool(selector.select(self._timeout_s))
        line = process.stdout.readline() if answered else ""
        if line:
            result: Result = json.loads(line)
            return result
        if answered:  # the pipe was closed: the process is ending by itself
            process.wait()
        self.close()
        lost = f"the process ended with exit code {process.returncode}" if answered else f"over {self._timeout_s:g} s"
        return {"type": model_type, "stage": "run", "error": lost}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError), self._process as process:
                process.kill()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._process


def serve(prepare: Callable[[], Callable[[str], Result]]) -> None:
    """Be a worker: read model types from standard input, write one JSON line for each.

    prepare: called once, returns what examines a type.
    """
    # Libraries print too; only answers may reach the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    examine = prepare()
    for line in sys.stdin:
        start = time.perf_counter()
        result = {"type": line.strip(), **examine(line.strip())}
        print(json.dumps({**result, "seconds": round(time.perf_counter() - start, 1)}), file=answers, flush=True)


def one_line(error: BaseException) -> str:
    """Say what is wrong without line breaks, paths of this machine, and a compiler's advice."""
    text = " ".join(str(getattr(error, "found", error)).split())
    for noise in (" For more information,", " For more details", " Developer debug context:", " from user code:"):
        text = text.partition(noise)[0]
    text = f"{type(error).__name__}: " + re.sub(r"\S*/site-packages/", "", text)
    return text if len(text) <= 400 else f"{text[:400]} ..."


def versions() -> dict[str, str]:
    """Return the versions that a result holds for."""
    return {name: version(name) for name in ("core", "torch", "transformers")}


def read_results(path: Path, key: Mapping[str, object]) -> dict[str, Result]:
    """Return the latest result of each type that was kept under this key and the installed versions."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        result = json.loads(line)
        if all(result.get(name) == value for name, value in {"versions": versions(), **key}.items()):
            found[result["type"]] = result
    return found


def sweep(
    worker: Worker,
    types: Sequence[str],
    path: Path,
    key: Mapping[str, object],
    *,
    again: bool,
    describe: Callable[[Result], str],
) -> None:
    """Run the types that have no result under this key, or all of them, and append each result as it comes."""
    known = {} if again else read_results(path, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            for model_type in types:
                if model_type not in known:
                    result = {**worker.run(model_type), "versions": versions(), **key}
                    file.write(json.dumps(result) + "\n")
                    file.flush()
                    print(describe(result), flush=True)
        finally:
            worker.close()


def escaped(text: str) -> str:
    """Return text fit for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
