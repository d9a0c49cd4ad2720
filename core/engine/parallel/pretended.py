"""A process that traces as a rank of several would: there is a process group, but nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from core.engine.parallel.agreement import PRETENDED


@contextmanager
def first_of(size: int) -> Iterator[None]:
    """Make this process believe that it is rank 0 of `size`. Collectives compute nothing: for traces and passes alone.

    By a backend that torch has for its own tests.
    """
    if size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group(PRETENDED, store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()
