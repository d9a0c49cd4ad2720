"""What the log of a start says at its usual level: what was done, without what fits no given model."""

from __future__ import annotations

import logging

import pytest
from torch import fx

from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Guards
from core.common.passes.results import NearMiss, PassResult
from core.compilation.rewrite.manager import PassManager


def with_result(name: str, result: PassResult, **fields: object) -> Pass:
    return Pass(name=name, run=lambda context: result, owner="acme", **fields)  # type: ignore[arg-type]


def test_the_log_names_passes_with_news_and_the_others_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    passes = [
        with_result("matches", PassResult(matched=2)),
        with_result("nearly", PassResult(matched=0, near_misses=(NearMiss(site="s", reason="eps"),))),
        with_result("idle", PassResult(matched=0)),
        with_result("refused", PassResult(matched=0), guards=Guards(nothing=lambda _: "nothing to do")),
    ]
    with caplog.at_level(logging.DEBUG, logger="core.passes"):
        PassManager(passes).run(fx.symbolic_trace(lambda x: x + 1))
    levels = {record.getMessage().split(":")[0]: record.levelno for record in caplog.records}
    assert levels == {
        "pass matches": logging.INFO,
        "pass nearly": logging.INFO,
        "pass idle": logging.DEBUG,
        "pass refused": logging.DEBUG,
    }
