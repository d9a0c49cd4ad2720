"""Passes of stage functional in core.compile and the engine: they see no writes, and the program writes in place."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import core
from core import InputSpec, Program
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass, PassTraits
from core.common.passes.effects import written_args
from core.common.passes.functional.reinplace import FIX_FUNCTIONALIZATION
from core.common.passes.functional.wrapped import FUNCTIONALIZED
from core.common.passes.pass_guards import Form
from core.common.passes.results import PassResult
from core.compilation.rewrite.inductor import as_inductor_pass
from core.errors import PassError, TraceError, UsageError
from tests.common.passes.functional.reinplace_cases import FORMS, OWN, STORE
from tests.installed import needs_static_cache
from tests.support import Cache, compile_with, cpu, refused

aten = torch.ops.aten
FIX = "fix_functionalization"
both = pytest.mark.parametrize("form", FORMS)
INPUTS = {"x": InputSpec(("n", 2), torch.float32), "slots": InputSpec(("n",), torch.int64)}
CALLS = [
    {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "slots": torch.tensor([5, 7])},
    {"x": torch.tensor([[-1.0, 0.5], [2.0, 8.0]]), "slots": torch.tensor([5, 0])},
]


class Writing(nn.Module):
    """A step with a custom op that writes a cache and a result, one on a temporary, and ATen writes."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()
        self.register_buffer("keys", torch.zeros(32, 2))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        h = x * 2
        OWN(h)
        out = torch.empty_like(x)
        STORE(h, self.keys, slots, out)
        return self.cache(out + h, slots)


def seeing(seen: list[Any], name: str = "acme_look", form: Form = "v2", **fields: Any) -> Pass:
    """Return a pass of stage functional that notes what it is given, and that nothing there writes but into inputs."""

    def run(context: PassContext) -> PassResult:
        nodes = [n for n in context.graph.nodes if n.op == "call_function"]
        seen.append([n.target for n in nodes])
        writing = [n for n in nodes if written_args(n)]
        assert all(n.target is aten.copy_.default and n.args[0].op == "placeholder" for n in writing)
        return PassResult(matched=1)

    return Pass(name=name, run=run, stage="functional", owner="acme", traits=PassTraits(form=form), **fields)


def compiled(*passes: Pass, model: nn.Module | None = None, **options: Any) -> Program:
    fields: dict[str, Any] = {"passes": passes}
    options = {"inputs": INPUTS, "buckets": [2], "lowering": "inline", **options}
    return compile_with(model or Writing(), cpu(**fields), **options)


class Copies(TorchDispatchMode):
    """Counts what is copied whole: tensors of the size of a cache."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.whole = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = ("clone", "copy_", "index_put", "index_copy", "new_empty_strided")
        is_copy = func in FUNCTIONALIZED or func._schema.name.removeprefix("aten::") in copies
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        if is_copy and any(isinstance(each, Tensor) and each.shape[:1] == (32,) for each in given):
            self.whole += 1
        return func(*args, **(kwargs or {}))


def outcomes(program: Program, model: nn.Module) -> list[Tensor]:
    """Return what a few calls give, and what the model's buffers are then."""
    found = [program(**call).clone() for call in CALLS]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.cases(1)
@both
def test_passes_see_a_functional_graph_and_the_program_writes_in_place(form: Form) -> None:
    seen: list[Any] = []
    models = Writing(), Writing()
    plain, program = compiled(model=models[0]), compiled(seeing(seen, form=form), model=models[1], strict=True)
    assert sum(target in FUNCTIONALIZED for target in seen[0]) == 2
    assert all(map(torch.equal, outcomes(program, models[1]), outcomes(plain, models[0])))
    with Copies() as copies:
        program(**CALLS[0])
    assert copies.whole == 0
    reports = {report.name: report for report in program.report().traces[0].passes}
    assert (reports["acme_look"].matched, reports[FIX].matched, reports[FIX].near_misses) == (1, 4, ())
    assert reports[FIX].stage == "functional" and program.report().traces[0].aten_s > 0


@pytest.mark.slow
def test_what_closes_a_stage_runs_only_with_it() -> None:
    seen: list[Any] = []
    assert FIX not in [report.name for report in compiled().report().traces[0].passes]
    for options in ({}, {"passes": ("acme_look",)}, {"enable_passes": ("acme_look",), "passes": ()}):
        names = [report.name for report in compiled(seeing(seen), **options).report().traces[0].passes]
        assert names[-2:] == ["acme_look", FIX]
    assert [report.name for report in compiled(passes=(FIX,)).report().traces[0].passes] == [FIX]
    assert len(seen) == 3


def test_without_the_fix_the_program_copies_and_is_right() -> None:
    models = Writing(), Writing()
    plain = compiled(model=models[0])
    program = compiled(seeing([]), model=models[1], disable_passes=(FIX,))
    assert all(map(torch.equal, outcomes(program, models[1]), outcomes(plain, models[0])))
    with Copies() as copies:
        program(**CALLS[0])
    assert copies.whole > 0  # so that the count above can fail


def test_passes_of_both_forms_and_of_stage_aten_each_see_their_graph() -> None:
    first: list[Any] = []
    second: list[Any] = []
    last: list[Any] = []

    def look(context: PassContext) -> PassResult:
        last.extend(n.target for n in context.graph.nodes if n.op == "call_function")
        return PassResult(matched=1)

    models = Writing(), Writing()
    program = compiled(
        seeing(second, "acme_v2"),
        seeing(first, "acme_v1", "v1"),
        Pass(name="acme_aten", run=look, stage="aten", owner="acme"),
        model=models[1],
    )
    assert torch.ops.higher_order.auto_functionalized in first[0]
    assert torch.ops.higher_order.auto_functionalized_v2 in second[0]
    assert STORE in last and aten.index_put_.default in last and not set(FUNCTIONALIZED) & set(last)
    names = [report.name for report in program.report().traces[0].passes if report.stage != "torch"]
    assert names == ["acme_v1", FIX, "acme_v2", FIX, "acme_aten"]
    assert all(map(torch.equal, outcomes(program, models[1]), outcomes(compiled(model=models[0]), models[0])))


def test_a_pass_may_be_written_for_the_wrapped_op() -> None:
    """As the passes of engines are: it matches the wrapper, and puts another op in its place."""

    def doubled(context: PassContext) -> PassResult:
        found = [n for n in context.graph.nodes if n.target in FUNCTIONALIZED and n.args[0] is OWN]
        for node in found:
            (base,) = node.kwargs["_all_bases"]
            (new,) = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
            with context.graph.inserting_before(node):
                scaled = context.graph.call_function(aten.mul.Tensor, (base, 2))
                result = context.graph.call_function(aten.add.Tensor, (scaled, 1))
            for made in (scaled, result):
                made.meta["val"] = torch.empty_like(new.meta["val"])
            new.replace_all_uses_with(result)
            context.graph.erase_node(new)
        return PassResult(matched=len(found), sites=tuple(node.name for node in found))

    models = Writing(), Writing()
    declared = Pass(name="acme_own", run=doubled, stage="functional", owner="acme", expect=1)
    program = compiled(declared, model=models[1], strict=True)
    assert all(map(torch.equal, outcomes(program, models[1]), outcomes(compiled(model=models[0]), models[0])))


class Sharing(nn.Module):
    """Two buffers that overlap, one of them written."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.zeros(12, 2)
        self.register_buffer("first", base[:8])
        self.register_buffer("second", base[4:])

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.first[slots] = x
        return self.second[:2] + x


def test_what_cannot_be_functional_runs_without_these_passes(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    with caplog.at_level(logging.WARNING, "core.passes"):
        program = compiled(seeing(seen), model=Sharing())
    assert "shares a part of its memory" in caplog.text and "skipped: acme_look" in caplog.text
    skipped = {report.name: report.skipped for report in program.report().traces[0].passes}
    assert "shares a part of its memory" in skipped["acme_look"] and seen == []
    call = {"x": CALLS[0]["x"], "slots": torch.tensor([4, 1])}
    assert torch.equal(program(**call), Sharing()(**call))
    with refused(TraceError, "functionalising a graph that writes", "do not overlap"):
        compiled(seeing(seen), model=Sharing(), strict=True)


def test_declarations_that_make_no_sense() -> None:
    with refused(PassError, "its form is 'v1'", "stage='functional'"):
        Pass(name="odd", run=lambda context: PassResult(matched=0), stage="aten", traits=PassTraits(form="v1"))
    with refused(UsageError, "choosing pass 'fix_functionalisation'", "did you mean 'fix_functionalization'"):
        compiled(passes=("fix_functionalisation",))


# --- in other hands


@contextmanager
def _post_pass(inside: Any, *, v2: bool) -> Iterator[None]:
    options = {
        "post_grad_custom_post_pass": inside,
        "fx_graph_cache": False,
        "enable_auto_functionalized_v2": v2,
        "compile_threads": 1,
    }
    torch._dynamo.reset()  # the other form compiled the same code
    with torch._inductor.config.patch(options), torch.no_grad():
        yield


@pytest.mark.slow
@both
def test_the_pass_runs_inside_inductor(form: Form) -> None:
    seen: list[Any] = []
    inside = as_inductor_pass([seeing(seen, form=form), FIX_FUNCTIONALIZATION], strict=True)
    models = Writing(), Writing()

    def reordered(x: Tensor, slots: Tensor) -> Tensor:
        """`a` is read before the second write; Inductor orders it behind, and there it stays."""
        h = x * 2
        OWN(h)
        a = h + 1
        OWN(h)
        return models[1](x, slots) + a * h

    def eager(x: Tensor, slots: Tensor) -> Tensor:
        h = x * 2 * 2 + 1
        return models[0](x, slots) + (h + 1) * (h * 2 + 1)

    with _post_pass(inside, v2=form == "v2"):
        step = torch.compile(reordered, fullgraph=True)
        for call in CALLS:
            torch.testing.assert_close(step(**call), eager(**call))
    assert all(map(torch.equal, models[0].buffers(), models[1].buffers()))
    (fixed,) = [report for report in inside.reports if report.name == FIX]
    assert fixed.matched >= 6
    assert [miss.reason for miss in fixed.near_misses] == ["add needs the old value of getitem_1 afterwards"]
    assert any(target in FUNCTIONALIZED for target in seen[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "route"), [pytest.param("llama", "paged", marks=pytest.mark.slow), ("bloom", "static")]
)
def test_the_engine_writes_its_cache_in_place(model_type: str, route: str) -> None:
    """A tiny model of transformers as `core run --pass` runs it: equal tokens, and nothing is copied."""
    pytest.importorskip("transformers")
    from core.engine.config import SamplingParams
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.engine.serve.engine import Engine
    from core.engine.steps.runner import EngineConfig

    needs_static_cache(model_type)
    seqs = 2 if route == "paged" else 1  # rows of the static cache are parts of one tensor, which decode reads whole
    config = EngineConfig(
        max_num_seqs=seqs,
        max_model_len=48,
        decode_buckets=(seqs,),
        prefill_buckets=(16,),
        sampling=("greedy",),
        options=core.CompileOptions(lowering="inline", strict=True),
    )
    loaded = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=torch.float32)
    tokens = []
    for mode in ("off", None):
        asked = replace(config, options=replace(config.options, mode=mode))
        with Engine(loaded, cpu(passes=(seeing([]),)), asked) as engine:
            assert engine.route == route
            params = SamplingParams(max_new_tokens=6, ignore_eos=True)
            tokens.append([each.token_ids for each in engine.generate([[3, 4, 5, 6], [20, 21, 22]], params)])
            reports = [report for trace in engine.report().traces for report in trace.passes if report.name == FIX]
    assert tokens[0] == tokens[1]
    assert reports and all(report.matched >= 2 and report.near_misses == () for report in reports)
