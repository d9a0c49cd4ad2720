"""Tests the fakes of an installed op library against its kernels, in a process that a call may crash."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import UsageError, error_from_json
from core.host.workers.worker import PersistentWorker, WorkerResult

FakeVerdict = Literal["agrees", "lies", "no fake", "not called"]

_START_S = 120.0  # to import torch and the library, on a slow machine
_ENOUGH = 32
_MAX_CALLS = 250
# Parts of a message that vary between calls of one fault: sizes, dtypes, numbers.
_DETAIL = re.compile(
    r"\([^()]*\)|\b(?:bool|(?:bfloat|complex|float|int|uint)\d+\w*)\b|(?<!result )\d+|(?<=fake ones: ).*"
)


@dataclass(frozen=True, slots=True)
class Lie:
    """One false statement of a fake or a schema about a kernel."""

    #: Kinds and values of the arguments.
    call: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCheck:
    """The result for one op."""

    op: str
    schema: str
    verdict: FakeVerdict
    #: A plugin declares the calls as samples; else they were guessed from the schema.
    declared: bool
    #: How many calls were compared.
    calls: int = 0
    #: Each kind of difference once, with its first call.
    lies: tuple[Lie, ...] = ()
    #: Why nothing, or not everything, could be compared; "" where everything was.
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryCheck:
    """The ops of a library, in order of name, checked on a device."""

    library: str
    #: The device's description.
    device: str
    ops: tuple[OpCheck, ...]


def check_library(library: str, device: str, *, timeout_s: float) -> LibraryCheck:
    """Compare the fake of each op that a library registers with its kernel.

    - library: an importable module, a .so or .py file, or a namespace of ops that are registered already.
    - device: a device's name. Its plugin's fakes are applied first; where it declares samples, these are the calls.
    - timeout_s: seconds that one call may take.

    The kernels run in an empty folder, which is removed with all that they wrote there. Raises `UsageError` for a
    library that can't be loaded or registers no op, and what `select_device` raises for the device.
    """
    with tempfile.TemporaryDirectory(prefix="core-fakes-", ignore_cleanup_errors=True) as folder:
        given = {"library": library, "device": device, "folder": folder}
        with PersistentWorker("core.verify.fakes.worker", given) as worker:
            opened = _open(worker, library, timeout_s)
            ops = tuple(_Check(worker, timeout_s, each).run() for each in opened["ops"])
            return LibraryCheck(library=library, device=opened["device"], ops=ops)


def _open(worker: PersistentWorker, library: str, timeout_s: float) -> dict[str, Any]:
    result = worker.request({"do": "open"}, timeout_s=_START_S + timeout_s)
    answer = result.answer or {}
    if "error" in answer:
        raise error_from_json(answer["error"])
    if "ops" not in answer:
        found = (
            f"loading it {_problem(result)}" if result.answer is None else f"it can't be loaded: {answer['failure']}"
        )
        raise UsageError(
            f"op library {library!r}",
            found=found,
            remedy="name an importable module, a .so or .py file, or a namespace of ops that torch knows",
        )
    return answer


def _problem(result: WorkerResult) -> str:
    """Say why there is no answer, with the last line that was printed where the process ended by itself."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    told = lines and result.problem.startswith("ended")
    return f"{result.problem} ({lines[-1]})" if told else result.problem


class _Check:
    """The check of one op: its calls one after the other, until enough were compared or there are no more."""

    def __init__(self, worker: PersistentWorker, timeout_s: float, described: dict[str, Any]) -> None:
        self._worker, self._timeout_s = worker, timeout_s
        self._op, self._described = described["op"], described
        self._compared = 0
        self._lies: dict[str, Lie] = {}
        self._refusals: list[str] = []
        self._lost = ""

    def run(self) -> OpCheck:
        """Make the calls and judge the op."""
        if not self._described["has_fake"]:
            return self._judged("no fake", "it can't run on fake tensors: no fake kernel, and no plugin declares one")
        for index in range(_MAX_CALLS):
            if self._compared == _ENOUGH or not self._make(index):
                break
        if self._lies:
            return self._judged("lies", self._lost)
        if self._compared:
            return self._judged("agrees", self._lost)
        return self._judged("not called", self._lost or self._refused())

    def _make(self, index: int) -> bool:
        """Make one call; False where no further one is to be made."""
        # Describe the call first: after a kernel has ended the process, nothing can describe it.
        described = self._request("describe", index)
        answer = described.answer or {"state": "lost"}
        if answer["state"] == "impossible":
            self._refusals.append(answer["why"])
        if answer["state"] == "lost":
            self._lost = f"the process {_problem(described)}"
        if answer["state"] != "described":
            return False
        call = answer["call"]
        made = self._request("call", index)
        if made.answer is None:
            # Each further crash would cost a restart of the process.
            self._lost = f"{call}: the process {_problem(made)}; no further call was made"
            return False
        if made.answer["state"] == "refused":
            self._refusals.append(f"{call}: {made.answer['why']}")
        else:
            self._compared += 1
            for what in made.answer["differences"]:
                self._lies.setdefault(_DETAIL.sub("", what), Lie(call, what))
        return True

    def _request(self, do: str, index: int) -> WorkerResult:
        limit = self._timeout_s if self._worker.running else _START_S + self._timeout_s
        return self._worker.request({"do": do, "op": self._op, "index": index}, timeout_s=limit)

    def _refused(self) -> str:
        if not self._refusals:
            return "there is no sample"
        more = len(self._refusals) - 1
        return f"{self._refusals[0]}" + (f" (and {more} more calls that it refuses)" if more else "")

    def _judged(self, verdict: FakeVerdict, reason: str) -> OpCheck:
        return OpCheck(
            op=self._op,
            schema=self._described["schema"],
            verdict=verdict,
            declared=self._described["declared"],
            calls=self._compared,
            lies=tuple(self._lies.values()),
            reason=reason,
        )
