"""core/common/passes/declaration.py and identity.py: contradictions refused, guards, identity."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.identity import Known, describing_once
from core.common.passes.pass_guards import Guards
from core.common.passes.patterns import Replacement
from core.common.passes.results import PassResult
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.manager import PassManager
from core.device import Capabilities
from core.errors import PassError
from tests.common.passes.graphs import traced
from tests.support import refused

ROOT = Path(__file__).resolve().parents[3]


def nothing(context: PassContext) -> PassResult:
    return PassResult(matched=0)


BASE = Pass(name="a", run=nothing, params={"width": 4})
PATTERN = Replacement(pattern=lambda x: x + 1, replacement=lambda x: x - 1)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "no run function"),
        ({"run": nothing, "patterns": (PATTERN,)}, "or has patterns"),
        ({"mechanism": "replace_pattern"}, "no pattern"),
        ({"mechanism": "replace_pattern", "patterns": (PATTERN,), "run": nothing}, "has a run function"),
        ({"mechanism": "inductor", "patterns": (PATTERN,)}, "its stage is 'torch'"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(fields: dict[str, Any], found: str) -> None:
    with refused(PassError, "declaring pass 'a' of acme", found, "set "):
        Pass(name="a", owner="acme", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"params": {"width": 8}},
        {"params": {"width": 4.0}},
        {"params": {"length": 4}},
        {"name": "b"},
        {"stage": "aten"},
        {"guards": Guards(tokens=(1, 64))},
        {"guards": Guards(tokens=(1, None))},
        {"guards": Guards(dtypes=frozenset({torch.float16}))},
        {"guards": Guards(world_size=(2, 8))},
        {"guards": Guards(implements=frozenset({"core::linear"}))},
        {"guards": Guards(capabilities={"fused": True})},
        {"run": lambda context: PassResult(matched=0)},
        {"run": partial(nothing)},
        {"expect": 3},
    ],
)
def test_the_uuid_changes_with_what_the_pass_does(fields: dict[str, Any]) -> None:
    assert replace(BASE, **fields).uuid() != BASE.uuid()


def test_the_uuid_ignores_what_it_does_not_do() -> None:
    assert replace(BASE, owner="acme", after=("b",)).uuid() == BASE.uuid() == replace(BASE).uuid()
    assert replace(BASE, params=dict(reversed({"width": 4, "a": 1}.items()))).uuid() == (
        replace(BASE, params={"a": 1, "width": 4}).uuid()
    )


def test_the_uuid_changes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    old = BASE.uuid()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert BASE.uuid() != old


def test_two_lambdas_of_one_line_differ() -> None:
    runs: list[Any] = [lambda context: PassResult(matched=0), lambda context: PassResult(matched=1)]
    first, second = (Pass(name="a", run=run) for run in runs)
    assert first.uuid() != second.uuid()


def test_what_a_run_closes_over_counts() -> None:
    def made(limit: object) -> Pass:
        return Pass(name="a", run=lambda context: PassResult(matched=int(bool(limit))))

    ids = {made(limit).uuid() for limit in (1, 2, "x", (1, 2), nothing, made, torch.float16, BASE)}
    assert len(ids) == 8
    assert made(1).uuid() == made(1).uuid()


def test_what_passes_share_is_described_once_and_no_uuid_is_another_for_it() -> None:
    def described(passes: Sequence[Pass], known: Known) -> list[str]:
        with describing_once(known):
            return [declared.uuid() for declared in passes]

    shared, alone = Known(), [Known() for _ in COMMON_PASSES]
    uuids = [declared.uuid() for declared in COMMON_PASSES]
    assert described(COMMON_PASSES, shared) == uuids == described(COMMON_PASSES[::-1], shared)[::-1]
    assert [described([each], known)[0] for each, known in zip(COMMON_PASSES, alone, strict=True)] == uuids
    assert len(shared) < sum(map(len, alone)) / 3


def test_what_changes_between_two_managers_is_seen() -> None:
    limits = [1]
    declared = Pass(name="a", run=lambda context: PassResult(matched=limits[0]))
    first = PassManager([declared])
    (before,) = first.uuids()
    limits.append(2)
    assert PassManager([declared]).uuids() != (before,) == first.uuids()


def test_patterns_and_replacements_count() -> None:
    def declared(**fields: Any) -> str:
        return Pass(name="a", mechanism="replace_pattern", patterns=(replace(PATTERN, **fields),)).uuid()

    ids = {
        declared(),
        declared(pattern=lambda x: x + 2),
        declared(replacement=lambda x: x - 2),
        declared(literals=("x",)),
        declared(check=lambda bound: None),
    }
    assert len(ids) == 5


HELPED = """
from core.common.passes import Pass, PassResult
LIMIT = {limit}
class Rule:
    size = 3
    def holds(self): return {rule}
def deep(): return {deep}
def helper(node): return deep() and Rule().holds()
def unused(): return {unused}
def run(context): return PassResult(matched=int(helper(context) and LIMIT))
DECLARED = Pass(name="a", run=run)
"""
PLAIN = {"limit": 1, "rule": 1, "deep": 1, "unused": 1}


def loaded(folder: Path, **changes: object) -> ModuleType:
    path = folder / f"helped{len(list(folder.iterdir()))}.py"
    path.write_text(HELPED.format(**PLAIN | changes), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("helped", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_helpers_classes_and_constants_of_the_module_count(tmp_path: Path) -> None:
    plain = loaded(tmp_path).DECLARED.uuid()
    assert loaded(tmp_path).DECLARED.uuid() == plain
    for change in ("limit", "rule", "deep"):
        assert loaded(tmp_path, **{change: 2}).DECLARED.uuid() != plain, change
    assert loaded(tmp_path, unused=2).DECLARED.uuid() == plain


@pytest.mark.slow
def test_the_uuid_is_the_same_in_another_process() -> None:
    code = "from tests.common.passes.test_declaration import BASE; print(BASE.uuid())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONHASHSEED": "7"}, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == BASE.uuid()


X = torch.ones(2, 8)
CAPABLE = Capabilities(device_name="x", dtypes=frozenset({torch.float32}), extra={"fused": True, "arch": 9})


@pytest.mark.parametrize(
    ("guards", "fields", "reason"),
    [
        (Guards(), {}, None),
        (Guards(dtypes=frozenset({torch.float32})), {}, None),
        (Guards(dtypes=frozenset({torch.float16})), {}, "no value in the graph has torch.float16 and rank 0 or more"),
        (Guards(min_rank=2), {}, None),
        (Guards(min_rank=3), {}, "no value in the graph has any dtype and rank 3 or more"),
        (Guards(capabilities={"fused": True}), {"capabilities": CAPABLE}, None),
        (Guards(capabilities={"fused": True}), {}, "the device's capability 'fused' is None, needed is True"),
        (
            Guards(capabilities={"arch": 10}),
            {"capabilities": CAPABLE},
            "the device's capability 'arch' is 9, needed is 10",
        ),
        (Guards(world_size=(2, 8)), {"world_size": 4}, None),
        (Guards(world_size=(2, 8)), {}, "it is for 2 to 8 processes, and this graph is for 1"),
        (Guards(world_size=(2, None)), {"world_size": 64}, None),
        (Guards(tokens=(1, 64)), {"tokens": (1, 64)}, None),
        (Guards(tokens=(1, 64)), {"tokens": (1, 65)}, "the graph serves 1 to 65 tokens, outside 1 to 64"),
        (Guards(tokens=(2, None)), {"tokens": (1, 9)}, "the graph serves 1 to 9 tokens, outside 2 or more"),
        (Guards(tokens=(1, 64)), {}, "made for 1 to 64 tokens, and how many this graph serves is unknown"),
        (Guards(implements=frozenset({"core::linear"})), {"implemented": frozenset({"core::linear"})}, None),
        (
            Guards(implements=frozenset({"core::linear", "core::rms_norm"})),
            {"implemented": frozenset({"core::linear"})},
            "the device does not implement core::rms_norm",
        ),
        (
            Guards(implements=frozenset({"core::linear"})),
            {},
            "the device does not implement core::linear, as far as is known",
        ),
    ],
)
def test_guards_refuse_with_a_reason(guards: Guards, fields: dict[str, Any], reason: str | None) -> None:
    assert PassContext(module=traced(torch.sin, X), guards=guards, **fields).refusal() == reason


def test_callables_of_any_kind_can_be_identified() -> None:
    class Runner:
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def __call__(self, context: PassContext) -> PassResult:
            return PassResult(matched=self.limit)

        def run(self, context: PassContext) -> PassResult:
            return PassResult(matched=self.limit)

    runs: list[Callable[[PassContext], PassResult]] = [Runner(1), Runner(2), Runner(1).run, Runner(2).run]
    assert len({Pass(name="a", run=run).uuid() for run in runs}) == 4
    assert Pass(name="a", run=Runner(1)).uuid() == Pass(name="a", run=Runner(1)).uuid()
