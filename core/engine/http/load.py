"""The present load of an engine, for gauges: sequences that run and wait, blocks of the cache that are taken."""

from __future__ import annotations

from dataclasses import dataclass

from core.engine.paged.tables import BlockTables
from core.engine.serve.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of an engine between two steps."""

    #: Sequences that hold cache.
    running: int
    #: Sequences that wait for cache.
    waiting: int
    #: Cache blocks that sequences hold, and all there are, of all groups of layers; 0 of 0 on transformers' static
    #: cache, which has none. Blocks that only wait to be found by a sequence that begins alike count as free.
    used_blocks: int
    num_blocks: int
    #: Graphs that are being compiled, those that draft too; their steps run by a quicker lowering.
    pending_graphs: int


def max_running(engine: Engine) -> int:
    """Return the most sequences that run at once."""
    return engine._runner.max_num_seqs


def load_of(engine: Engine) -> Load:
    """Return the load of an engine; call it in the thread that steps it."""
    scheduler, cache = engine._scheduler, engine._runner.cache
    reports = (engine.report(), engine.drafter.report())
    pools = cache.pools if isinstance(cache, BlockTables) else ()
    total = sum(pool.num_blocks - 1 for pool in pools)  # each group has a null block, which no sequence gets
    used = total - sum(pool.num_free for pool in pools)
    return Load(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        used_blocks=used,
        num_blocks=total,
        pending_graphs=sum(len(each.pending) for each in reports if each is not None),
    )
