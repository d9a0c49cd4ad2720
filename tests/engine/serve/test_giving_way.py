"""Random loads on cache blocks without a model: a sequence gives its cache back only where others need it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from core.engine.config import SamplingParams
from core.engine.inspect.masks import Reach
from core.engine.paged.blocks import NULL_BLOCK, BlockPool
from core.engine.paged.tables import BlockTables
from core.engine.serve.scheduler import Scheduler
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Step

BLOCK = 4
LONGEST = 32
Held = list[set[int]]
"""The blocks that a sequence holds of each pool."""


class Load:
    """Sequences of random lengths, beginnings and priorities on few blocks, some of layers with a window."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.drafts = rng.choice([0, 0, 3])
        self.windows = rng.choice([(Reach(),), (Reach(), Reach(8)), (Reach(), Reach(4, chunked=rng.random() < 0.5))])
        self.pools = [BlockPool(1 + LONGEST // BLOCK + rng.randrange(2, 12)) for _ in self.windows]
        self.cache = BlockTables(self.pools, self.windows, block_size=BLOCK)
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=5, max_step_tokens=12, num_drafts=self.drafts, propose=self._propose
        )
        self.beginnings = [[rng.randrange(9) for _ in range(12)] for _ in range(2)]
        #: Of those that gave way in the present call: what they held, and how many blocks more they wanted by pool.
        self.gave_way: dict[int, tuple[Held, list[int]]] = {}
        self.num_gave_way = 0
        self._preempt = self.scheduler._preempt
        self.scheduler._preempt = self._preempted  # type: ignore[method-assign]

    def _preempted(self, sequence: Sequence) -> None:
        count = 0 if sequence.in_prompt else -(-(sequence.num_computed + 1) // BLOCK)
        self.gave_way[sequence.index] = held(sequence), [max(0, count - len(table)) for table in sequence.tables]
        self._preempt(sequence)

    def _propose(self, wanted: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        return [tuple(range(self.rng.randint(0, count))) for _, count in wanted]

    def add(self, index: int) -> None:
        rng = self.rng
        prompt = [*rng.choice([[], *self.beginnings]), *(rng.randrange(9) for _ in range(rng.randint(1, 10)))]
        params = SamplingParams(max_new_tokens=rng.randint(1, LONGEST - len(prompt)), priority=rng.choice([0, 0, 1]))
        self.scheduler.add(Sequence(index, prompt, params))

    def schedule(self) -> Step | None:
        """Schedule, and look whether any that gave way could have gone on beside all that others have now."""
        self.gave_way.clear()
        before = {each.index: held(each) for each in self.scheduler._running}
        step = self.scheduler.schedule()
        kept: Held = [set() for _ in self.pools]
        for each in self.scheduler._running:
            for blocks, now, old in zip(kept, held(each), before.get(each.index, kept), strict=True):
                blocks |= now & old
        for index, (blocks, more) in self.gave_way.items():
            needed = [len(own - others) + count for own, others, count in zip(blocks, kept, more, strict=True)]
            could = all(count <= pool.num_free for pool, count in zip(self.pools, needed, strict=True))
            assert not could, f"sequence {index} gave its cache back for nothing"
        self.num_gave_way += len(self.gave_way)
        return step

    def compute(self, step: Step) -> None:
        """Stand in for the engine."""
        for part in step.parts:
            part.launched(step.times)
        for part in step.parts:
            sequence = part.sequence
            if part.emits:
                count = self.rng.randint(0, len(part.drafts)) if part.drafts else step.times - 1
                sequence.num_awaited = 0
                sequence.num_computed += count if part.drafts else 0
                sequence.generated += [self.rng.randrange(9) for _ in range(count + 1)]
            sequence.num_settled = sequence.num_computed
            self.cache.settle(sequence)
            if len(sequence.generated) >= sequence.params.max_new_tokens:
                self.scheduler.remove(sequence)


def held(sequence: Sequence) -> Held:
    return [{block for block in table if block != NULL_BLOCK} for table in sequence.tables]


def serve(load: Load) -> None:
    coming = list(range(load.rng.randint(4, 12)))
    for _ in range(1000):
        while coming and load.rng.random() < 0.3:
            load.add(coming.pop(0))
        step = load.schedule()
        if step is not None:
            if step.phase == "decode" and not load.drafts:
                times = min(load.rng.choice([1, 4]), *(part.sequence.num_left for part in step.parts))
                step = replace(step, times=load.scheduler.grow(step, times))
            load.compute(step)
        elif not coming:
            assert load.scheduler.num_running == load.scheduler.num_waiting == 0
            assert all(pool.num_free == pool.num_blocks - 1 for pool in load.pools)
            return
    raise AssertionError("some sequence starves")


@pytest.mark.cases(3)
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_a_sequence_gives_way_only_where_others_need_what_it_holds(first: int) -> None:
    loads = [Load(seed) for seed in range(first, first + 30)]
    for load in loads:
        serve(load)
    assert sum(load.num_gave_way for load in loads) > 10
