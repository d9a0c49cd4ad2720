"""Joins the processes that torchrun started. Processes, groups and backends are those of torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch import distributed

from core.errors import UsageError

__all__ = ["Processes", "initialize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """This process's place among the processes of a job."""

    rank: int
    #: Number of processes.
    size: int
    #: Its number among the processes of its host, which is the index of its device.
    local_rank: int


def initialize(backend: str | None = None, *, timeout_s: float = 600.0) -> Processes:
    """Join the default process group of the job that torchrun started, once, and return this process's place in it.

    backend: of torch.distributed ("gloo" on the host); None for torch's default for the devices at hand. timeout_s:
    after which a collective that others do not join is an error. A script that was started by itself is a job of one
    process, for which nothing is initialised; a group that was initialised before stays as it is. Raises `UsageError`
    if the group can't be made.
    """
    if not distributed.is_available():
        raise UsageError(
            "joining a process group", found="this torch has no torch.distributed", remedy="install one that has"
        )
    if not distributed.is_initialized():
        if not distributed.is_torchelastic_launched():
            return Processes(rank=0, size=1, local_rank=0)
        try:
            distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                f"joining the process group of torchrun (backend {backend or 'by default'!r})",
                found=f"{type(error).__name__}: {error}",
                remedy="name a backend that this torch has, and look whether all processes still run",
            ) from error
    return Processes(
        rank=distributed.get_rank(),
        size=distributed.get_world_size(),
        local_rank=distributed.get_node_local_rank(fallback_rank=0),
    )
