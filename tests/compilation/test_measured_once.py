"""core/compilation/measuring.py: without a compile cache, a process keeps what it has timed."""

from __future__ import annotations

import pytest

from core.compilation import measuring
from tests.compilation.test_measuring import (
    GROWING,
    STEADY,
    Others,
    compiled,
    failing,
    implementation,
    served,
    trace_of,
)
from tests.support import cpu


def test_a_process_without_a_cache_times_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of a model are equal to the last bit: noise of a clock must not give them other implementations."""
    monkeypatch.setattr(measuring, "_KNOWN", {})
    device = cpu(ops=(STEADY, GROWING))
    first, again, other = compiled(device), compiled(device), compiled(device, Others())
    assert [each.report().num_measured for each in (first, again, other)] == [2, 0, 0]
    assert trace_of(again).measured == trace_of(first).measured
    assert served(again, 2) == {"growing"} and served(again, 32) == {"steady"}
    assert compiled(cpu(ops=(STEADY, implementation(failing)))).report().num_measured == 2
