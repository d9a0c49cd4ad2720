"""What the sweeps over model types share: a worker process, restarted when lost, and results in JSON lines."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from core.host.workers.worker import PersistentWorker

Result = dict[str, Any]


class Worker:
    """A process that examines one model type after the other; started on first use and again after it was lost.

    module: one whose `answer` takes {"type": a model type} and what is `given`, and returns the result; with "lost",
    why no other type can be examined in that process, whose device may be past use.
    """

    def __init__(self, module: str, timeout_s: float, **given: str) -> None:
        self._worker = PersistentWorker(module, given)
        self._timeout_s = timeout_s

    def run(self, model_type: str) -> Result:
        """Return the result of one type; a crash or a time-out is a result too."""
        start = time.perf_counter()
        done = self._worker.request({"type": model_type}, timeout_s=self._timeout_s)
        answer = done.answer or {"stage": "run", "error": f"the process {done.problem}"}
        if lost := answer.pop("lost", ""):
            self._worker.kill()
            # Of what was computed before the loss nobody knows whether it is right.
            answer = {"error": lost, **answer, "stage": "run" if answer["stage"] == "done" else answer["stage"]}
        return {"type": model_type, **answer, "seconds": round(time.perf_counter() - start, 1)}

    def close(self) -> None:
        """End the process."""
        self._worker.close()


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
    types: Iterable[str],
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
