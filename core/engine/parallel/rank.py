"""This process as one rank of a job: its place, its device, and what it tells whoever started it.

What a rank tells stands in files beside the one that torch.distributed's launchers name in TORCHELASTIC_ERROR_FILE, so
that it outlives the rank. Environment variables are torchrun's.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from core.errors import (
    CoreError,
    DeviceUnavailableError,
    UsageError,
    error_json,
    is_out_of_memory,
    notes_of,
    one_line,
)

if TYPE_CHECKING:
    from core.device import Device

log = logging.getLogger("core.engine")

LAUNCHED = "core.tp-"
"""The id of a job that `launch.py` started begins so; the number of the starting process follows."""
PHASES = ("start", "load", "capture", "serve")

LEAVE_S = 5.0
"""How long a rank may take to leave its groups: others may be lost, or late."""
_joined: list[str] = []
"""Backends of the groups that `open_device` has joined and `leave` has not left."""

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a job; its launcher starts the ranks with these held back."""
_RUN_ID, _ERROR_FILE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1
_WAITED = re.compile(
    r"waits in .* for rank \d+: (?!it called)|did not (?:come|join) within|gloo[/\\]|NCCL|HCCL"
    r"|Connection (?:closed by peer|reset by peer|refused)|Broken pipe|Socket Timeout"
    r"|Timed out waiting|wait timeout|Watchdog caught collective",
)
"""What collectives and stores say when another rank is lost or late: the fault is not this rank's."""


def num_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes the job of this process has; 1 where no launcher started it."""
    return int(environ.get("WORLD_SIZE", "1")) if _RUN_ID in environ else 1


def own_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank; 0 where no launcher started it."""
    return int(environ.get("RANK", "0")) if _RUN_ID in environ else 0


def is_launched() -> bool:
    """Tell whether `launch.py` started this process, and reports for it."""
    return os.environ.get(_RUN_ID, "").startswith(LAUNCHED)


def end_with_launcher() -> None:
    """Ask the kernel to end this process with the one that started it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_RUN_ID].removeprefix(LAUNCHED)):
        os._exit(1)


def note_phase(phase: str) -> None:
    """Tell the launcher how far this rank has come: one of `PHASES`."""
    assert phase in PHASES, phase
    _write("phase", phase)


def report(error: BaseException) -> None:
    """Tell the launcher why this rank ends; only the first error counts."""
    folder = _folder()
    if folder is None or (folder / "outcome").exists():
        return
    if isinstance(error, CoreError):
        fields: dict[str, Any] = error_json(error)
    else:
        text = f"{type(error).__name__}: {one_line(str(error))}"
        fields = {"type": "CoreError", "asked": "", "found": text, "remedy": "", "notes": notes_of(error)}
    _write("outcome", json.dumps({"error": fields, "waited": has_waited(error), "memory": is_out_of_memory(error)}))


def finish(code: int) -> None:
    """Tell the launcher that this rank's work is done, with the exit code of the command."""
    folder = _folder()
    if folder is not None and not (folder / "outcome").exists():
        _write("outcome", json.dumps({"code": code}))


def has_waited(error: BaseException | None) -> bool:
    """Tell whether an error says that another rank is lost or late."""
    while error is not None:
        if _WAITED.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _folder() -> Path | None:
    file = os.environ.get(_ERROR_FILE)
    return Path(file).parent if file else None


def _write(name: str, text: str) -> None:
    folder = _folder()
    if folder is None:
        return
    part = folder / f"{name}.part"
    with suppress(OSError):  # the launcher has ended, or the disk is full; the rank itself goes on
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """This process among the ranks of its job."""

    index: int = 0
    size: int = 1
    #: What was done about cores, as a phrase; "" where nothing was.
    cores: str = ""
    started_s: float = 0.0

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all."""
        return self.index == 0


def check_no_index(name: str, size: int) -> None:
    """Raise `UsageError` where several ranks are asked for and the device's name has an index."""
    if size > 1 and ":" in name:
        found = "each rank takes the device of its own number"
        raise UsageError(f"--device {name} on {size} ranks", found=found, remedy="leave the index out")


def open_device(name: str, *, timeout_s: float) -> tuple[Device, Rank]:
    """Open this rank's device and join the others of the job; one process alone opens the device that is named.

    Each rank of a machine takes the device of its own number; on the processor each takes a part of the cores.
    timeout_s: how long a rank waits for the others. Raises `UsageError` for a name with an index.
    """
    from core.host.selection import select_device

    if num_ranks() == 1:
        return select_device(name), Rank()
    from torch import distributed

    from core.engine.models.distributed import initialize
    from core.engine.parallel.cores import pin

    local = int(os.environ.get("LOCAL_RANK", "0"))
    done = ""
    check_no_index(name, num_ranks())
    device = _device_of_rank(name, local)
    if _is_common(device):  # one device for all ranks computes on the machine's cores
        done = pin(local, int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks()))))
    backend = distributed.get_default_backend_for_device(device.torch_device)
    was_there = distributed.is_initialized()
    place = initialize(backend, timeout_s=timeout_s)
    if not was_there and distributed.is_initialized():
        _joined.append(backend)
    return device, Rank(index=place.rank, size=place.size, cores=done, started_s=time.monotonic())


def leave() -> None:
    """Leave the job's groups, if `open_device` has joined them: some backends leak what they hold where nobody does.

    Takes `LEAVE_S` at most, whatever the other ranks do; a rank that has failed leaves as well.
    """
    if not _joined:
        return
    backend = _joined.pop()
    leaving = threading.Thread(target=_destroy_groups, name="core-leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    if leaving.is_alive():
        log.warning("the groups of backend %s were not left within %g s; the process ends with them", backend, LEAVE_S)


def _destroy_groups() -> None:
    from torch import distributed

    try:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except Exception as error:  # the rank's own end must not fail by it
        log.warning("the groups of the job can't be left: %s", one_line(f"{type(error).__name__}: {error}"))


def _device_of_rank(name: str, local: int) -> Device:
    """Open the device of a rank's own number and no other, which would take memory there; or that of all ranks.

    Raises `DeviceUnavailableError` where there are fewer devices than ranks.
    """
    from core.host.selection import select_device

    try:
        return select_device(name, local)
    except DeviceUnavailableError as error:
        device = select_device(name) if local else None
        if device is None:
            raise
        if _is_common(device):
            return device
        if device.name != name:  # "auto" tells of the last that it tried, not of the device that other ranks have
            return _device_of_rank(device.name, local)
        ranks = os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks()))
        raise DeviceUnavailableError(
            f"a device {name!r} for each of the {ranks} ranks of this machine",
            found=f"none of number {local}, counted from 0: {error.found}",
            remedy=f"start no more ranks than there are devices (--tp), or make more of them visible: {error.remedy}",
        ) from error


def _is_common(device: Device) -> bool:
    return cast("Any", device.torch_device).index is None
