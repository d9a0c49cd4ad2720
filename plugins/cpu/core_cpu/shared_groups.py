"""Joining the processes of a group that run on one machine, by memory that all of them map (csrc/channel.h).

The first rank makes the memory and tells the others through the group's store where it is. The memory has no name in
any folder, so nothing is left behind however processes end. Either all of a group join, or none.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from core.common.ops.collective.collectives import shared_group
from core.common.telling import tell
from core_cpu import extension
from core_cpu.own_ops import LIBRARY

log = logging.getLogger("core.cpu")

SLOT_BYTES = 256 * 1024
"""A message at most; each process has two slots."""
PAGE_BYTES = 4096
_FLAG_BYTES = 64
_LOCK = threading.RLock()
_joined: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Process group -> why it is not joined, "" where it is."""


def join(group: str) -> str:
    """Join the others of a group, which wait for this, and return why not; "" where its processes share memory.

    group: as canonical collectives name it. Asked again, it gives the same answer at once. All processes of the group
    must ask. Raises `LoweringError` where one of them does not within the group's timeout.
    """
    found = shared_group(group)
    if found is None:
        return "nobody shares the group"
    with _LOCK:
        reason = _joined.get(found)
        if reason is None:
            reason = _joined[found] = _why_no_gloo(found) or _join(found)
    return reason


def _why_no_gloo(found: Any) -> str:
    """Return why a group's collectives are no business of this plugin."""
    try:
        backend = found._get_backend(torch.device("cpu")).name()
    except RuntimeError:
        return f"group {found.group_name!r} has no backend for the processor"
    return "" if backend == "gloo" else f"group {found.group_name!r} has backend {backend!r}, not 'gloo'"


def _join(found: Any) -> str:
    timeout: timedelta = found._get_backend(torch.device("cpu")).options._timeout
    reason, file, place = extension.load("collectives"), -1, ""
    with ExitStack() as undo:  # a process that does not come is an error, which must leave no memory
        if not reason and found.rank() == 0:
            try:
                file, place = _made(found.size())
                undo.callback(os.close, file)
            except OSError as error:
                reason = f"{type(error).__name__}: {error}"
        place = _told(found, place, timeout)[0]
        number = -1
        if not reason:
            try:
                undo.pop_all()  # the channel closes the file
                number = _open(found, file if found.rank() == 0 else _open_that_of(place), timeout)
                undo.callback(torch.ops.core_cpu.close_group, number)
            except (OSError, RuntimeError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
        answers = enumerate(_told(found, reason, timeout))
        refused = [f"rank {rank}: {answer}" for rank, answer in answers if answer]
        if number >= 0 and not refused:
            undo.pop_all()
            weakref.finalize(found, torch.ops.core_cpu.close_group, number).atexit = False
    if refused:
        log.warning("collectives of group %r go by gloo: %s", found.group_name, "; ".join(refused))
    return f"the group's processes do not share memory: {refused[0]}" if refused else ""


def _told(found: Any, own: str, timeout: timedelta) -> list[str]:
    return tell(found, "core_cpu", "joining through shared memory group", own, timeout=timeout)


def _made(size: int) -> tuple[int, str]:
    """Make the memory of a group; return its file, and what finds it from another process."""
    name = f"core_cpu-{secrets.token_hex(8)}"
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes(size))
    return file, f"{os.getpid()} {file} {name}"


def _open(found: Any, file: int, timeout: timedelta) -> int:
    """Map the group's memory; return its number."""
    # The default group has two names.
    names = [*([""] if found is distributed.group.WORLD else []), found.group_name]
    number: int = torch.ops.core_cpu.open_group(
        names, file, found.rank(), found.size(), SLOT_BYTES, timeout.total_seconds()
    )
    return number


def _open_that_of(told: str) -> int:
    """Open a file of another process of this machine; raise `OSError` where there is no such process here."""
    if not told:
        raise OSError("rank 0 has no memory to share")
    process, file, name = told.split()
    path = f"/proc/{process}/fd/{file}"
    # On another machine, or in another container, the same number may name anything.
    with suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{name}"):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    raise OSError("the memory of rank 0 is not on this machine, or in another container")


def num_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the size of the memory of a group of `size` processes; csrc/channel.h says what lies there."""
    flags = -(-size * _FLAG_BYTES // PAGE_BYTES) * PAGE_BYTES
    return flags + size * 2 * slot_bytes


LIBRARY.define("join_group(str group) -> bool")
LIBRARY.impl("join_group", lambda group: not join(group), "CompositeExplicitAutograd")
