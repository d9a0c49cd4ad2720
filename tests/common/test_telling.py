"""core/common/telling.py: what processes of a group tell each other, and who is named where one tells nothing."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from core.common.telling import RanksSilent, exchange, ranks_text, tell
from core.errors import LoweringError
from tests.support import refused

SOON = timedelta(seconds=0.2)


class Group:
    """What `tell` asks of a process group."""

    group_name = "pair"

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, lambda: rank, lambda: size

    def get_group_store(self) -> Any:
        return self.store


def store() -> Any:
    made = distributed.HashStore()  # type: ignore[attr-defined]
    made.set_timeout(SOON)
    return made


def test_each_rank_gets_the_texts_of_all_in_their_order() -> None:
    shared, got = store(), {}
    shared.set_timeout(timedelta(seconds=20))

    def told(rank: int, own: str) -> None:
        got[rank] = exchange(shared, rank, 3, own)

    threads = [threading.Thread(target=told, args=each) for each in ((2, "c"), (0, ""), (1, "ä!"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {rank: ["", "ä!", "c"] for rank in range(3)}


def test_ranks_that_tell_nothing_are_named() -> None:
    with pytest.raises(RanksSilent, match=r"ranks 0, 2 did not come within 0\.2 s") as caught:
        exchange(store(), 1, 3, "here")
    assert caught.value.ranks == (0, 2)
    with pytest.raises(RanksSilent, match=r"rank 1 did not come within 0\.1 s"):
        exchange(store(), 0, 2, "here", timeout=timedelta(seconds=0.1))


def test_each_talk_of_a_group_has_its_own_place_in_the_store() -> None:
    shared = store()
    for number, text in enumerate(("first", "second"), start=1):
        shared.set(f"test_telling/{number}/1", f"!{text}")
        assert tell(Group(shared, 0, 2), "test_telling", "joining group", "mine") == ["mine", text]
    with refused(LoweringError, "joining group 'pair', as rank 0 of 2", "rank 1 did not come within 0.2 s"):
        tell(Group(shared, 0, 2), "test_telling", "joining group", "mine")


def test_names_of_ranks() -> None:
    assert [ranks_text(ranks) for ranks in ([1], [0, 2])] == ["rank 1", "ranks 0, 2"]
