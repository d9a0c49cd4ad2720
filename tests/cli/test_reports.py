"""What `core run` says of its own result: why compiled is slower than eager, where it is."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from core.cli.reports.run import _why_slower


def engine(*, computed: int = 9, padded: int = 0, num_captures: int = 2, **report: Any) -> Any:
    defaults = {"modes": {"decode": "full"}, "fallbacks": Counter(), "lowering": "inductor"}
    made = SimpleNamespace(**defaults | report, num_captures=num_captures)
    stats = SimpleNamespace(computed=computed, padded=padded)
    return SimpleNamespace(report=lambda: made, stats=lambda: stats)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({}, "not known from this run: `core bench` measures longer, `core explain --kernels` shows each kernel"),
        ({"modes": {"decode": "off", "prefill": "off"}}, "decode and prefill ran eagerly inside the engine"),
        ({"fallbacks": {"too large": 1}}, "1 call ran eagerly"),
        ({"lowering": "inline"}, "lowering inline runs op by op, as eager does"),
        ({"computed": 10, "padded": 30}, "30 of 40 computed tokens were padding"),
        ({"fallbacks": {"a": 1, "b": 2}, "padded": 30}, "3 calls ran eagerly; 30 of 39 computed tokens were padding"),
    ],
)
def test_a_slower_run_says_why(run: dict[str, Any], said: str) -> None:
    assert _why_slower(engine(**run)) == said
