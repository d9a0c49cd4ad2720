"""core/common/collector.py: the collector rests inside and is afterwards as it was before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from core.common import collector
from core.common.collector import frozen, is_frozen, paused

Context = Callable[[], AbstractContextManager[None]]
BOTH = pytest.mark.parametrize("context", [paused, frozen], ids=lambda context: context.__name__)


pytestmark = [pytest.mark.usefixtures("nothing_frozen"), pytest.mark.slow]  # each walks all objects


@pytest.mark.slow
def test_a_whole_process_is_frozen_and_thawed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gc.unfreeze()
    assert not is_frozen()
    with frozen():
        assert is_frozen() and gc.get_freeze_count() > 5 * collector._FEWEST_FROZEN
    assert not is_frozen()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def orphan() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


@BOTH
@pytest.mark.parametrize("enabled", [True, False])
def test_it_rests_inside_and_is_as_before_afterwards_also_after_an_error(context: Context, enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ValueError, match="within"), context():
        assert not gc.isenabled()
        raise ValueError("within")
    assert gc.isenabled() == enabled
    assert not is_frozen()


def test_frozen_frees_the_dead_first_and_then_nothing_that_was_alive() -> None:
    gc.disable()
    dead, alive = orphan(), Cycle()
    still = weakref.ref(alive)
    with frozen():
        assert dead() is None
        del alive
        gc.collect()
        assert still() is not None
    gc.collect()
    assert still() is None


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    with frozen():
        assert is_frozen()
    assert is_frozen()


def test_what_was_made_after_the_callers_freeze_is_still_freed() -> None:
    gc.freeze()
    later = Cycle()
    still = weakref.ref(later)
    with frozen():
        pass
    del later
    gc.collect()
    assert still() is None


@BOTH
def test_blocks_that_overlap_in_threads_end_with_the_last(context: Context) -> None:
    """Two threads capture at once: the first to end must not let the collector loose, nor the last leave it frozen."""
    first, second, third = context(), context(), context()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled() and is_frozen() is (context is frozen)
    third.__enter__()
    second.__exit__(None, None, None)
    assert not gc.isenabled() and is_frozen() is (context is frozen)
    third.__exit__(None, None, None)
    assert gc.isenabled() and not is_frozen()


def test_a_few_immortal_objects_are_no_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 100)  # as after any collection from Python 3.12 on
    unfrozen = []
    monkeypatch.setattr(gc, "unfreeze", lambda: unfrozen.append(1))
    with frozen():
        pass
    assert unfrozen == [1]


@BOTH
def test_nobody_walks_the_objects_of_other_threads(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc.get_objects` makes `tuple(generator)` in another thread fail with a SystemError."""

    def walk(generation: int | None = None) -> list[object]:
        raise AssertionError("the collector's objects were asked for")

    monkeypatch.setattr(gc, "get_objects", walk)
    with context():
        assert is_frozen() is (context is frozen)
