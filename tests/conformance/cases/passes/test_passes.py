"""core_conformance/cases/passes/collect.py: right passes get through, wrong ones fail in the case for
that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

import core.compilation.rewriting
from core.common.conformance import ConformanceProfile
from core.common.ops.declaration import declared_ops
from core.common.ops.implementation import OpImplementation
from core.common.passes.declaration import Pass
from core.common.passes.results import PassResult
from core.common.passes.standard import COMMON_PASSES
from core.device import Device
from core.verify.bisect.bisection import injected
from core.verify.planted import planted
from core_conformance.cases.passes import collect as area
from core_conformance.cases.passes.runs import CORPUS
from tests.conformance.cases.passes import wrong_passes as wrong
from tests.conformance.cases.passes.pass_support import KINDS, cases, elsewhere, failures, keep, of
from tests.support import cpu

NAMES = [declared.name for declared in COMMON_PASSES if declared.guards.world_size[0] == 1]
NEEDY = [declared.name for declared in COMMON_PASSES if declared.guards.implements]
MODELS: Mapping[str, tuple[str, ...]] = {
    "remove_no_ops": ("no-ops",),
    "lift_rms_norm": ("rms-norm",),
    "fuse_add_rms_norm": ("residual-norm",),
    "lift_layer_norm": ("layer-norm",),
    "lift_gated_activation": ("gated-mlp",),
    "fuse_gate_up": ("gated-mlp",),
    "merge_linears": ("linears",),
    "merge_lora": ("adapters",),
    "lift_rotary": ("rotary-halves", "rotary-neighbours"),
    "fuse_qk_norm_rotary": ("normed-rotary",),
    "lift_attention": ("attention",),
    "fuse_attention_cache": ("cached-attention",),
    "lift_moe_route": ("router",),
    "lift_grouped_mlp": ("experts",),
    "lift_linear": ("linears",),
    "lift_causal_conv1d": ("convolution-step",),
    "lift_gated_delta_rule": ("delta-rule-step",),
    "lift_selective_state_update": ("state-space-step",),
    "fuse_gated_linear": ("gated-mlp",),
    "lift_rotary_table": ("rotary-halves",),
}
"""Pass -> the models of the corpus that are enough to judge it. The others bring examples of their own."""


@pytest.fixture(scope="module")
def plain() -> Device:
    """Return one device for all tests of right passes: they share what is computed."""
    return cpu()


@pytest.fixture(scope="module")
def bringing() -> Device:
    """Return a device that brings the ops without which some passes do not run."""
    names = sorted(frozenset().union(*(declared.guards.implements for declared in COMMON_PASSES)))
    references = {name: declared_ops()[name].reference for name in names}
    return cpu(ops=tuple(OpImplementation(op=name, name="own", fn=fn) for name, fn in references.items()))


@pytest.fixture(scope="module")
def lacking() -> Device:
    """Return a device that brings no op, whatever kernels this machine could build."""
    return cpu(ops=())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave of the corpus what has soft caps, and one model without, which is enough to judge a pass for these."""
    keep(monkeypatch, "soft-cap", "repeats")
    elsewhere(monkeypatch)


# --- right passes


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "fuse_attention_quantize" else ())
        for name in NAMES
        if name not in NEEDY
    ],
)
def test_each_common_pass_fires_and_is_right(plain: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that the device calls unprofitable."""
    assert "merge_linears" in plain.capabilities.unprofitable
    keep(monkeypatch, "repeats", *MODELS.get(name, ()))
    assert of(plain, name, "fires", "float32") == {}


@pytest.mark.slow
def test_common_passes_are_right_in_the_whole_corpus_and_known_by_the_same_identity_elsewhere() -> None:
    device = cpu()
    found = {name: of(device, name, "fires", "float32", "identity") for name in NAMES if name not in NEEDY}
    assert found == {name: {} for name in found}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "rotary" in name else ()) for name in NEEDY]
)
def test_passes_that_need_an_op_of_the_device_are_judged_where_it_is(
    lacking: Device, bringing: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "repeats", *MODELS.get(name, ()))
    assert of(bringing, name, "fires", "float32", "bfloat16", "near-miss") == {}
    assert {case.not_supported for case in cases(bringing).values() if case.id.startswith(f"passes/{name}/")} == {""}
    (reason,) = {case.not_supported for case in cases(lacking).values() if case.id.startswith(f"passes/{name}/")}
    assert reason.startswith("its guard: the device does not implement core::")


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["lift_rms_norm", "fuse_attention_cache", "eliminate_common_subexpressions"])
def test_common_passes_keep_the_numbers_of_near_misses(
    plain: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "repeats", *MODELS.get(name, ()))
    assert of(plain, name, "near-miss") == {}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["soft-cap", "experts", "cached-attention", "decoder"])
def test_programs_of_small_models_are_right(plain: Device, name: str) -> None:
    pytest.importorskip("transformers", reason="grouped products in fp32 are its own")
    assert failures(plain, f"passes/pipeline/{name}/float32") == {f"passes/pipeline/{name}/float32": []}


@pytest.mark.slow
def test_a_tiny_model_is_right(plain: Device) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    assert failures(plain, "passes/models/llama") == {"passes/models/llama": []}


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_right_pass_of_a_device_passes_all_its_cases() -> None:
    assert of(cpu(passes=(wrong.softcaps(wrong.right),)), "softcap") == {}


def test_an_identity_that_is_the_same_in_another_process_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = wrong.softcaps(wrong.right)
    elsewhere(monkeypatch, softcap=right.uuid())
    assert of(cpu(passes=(right,)), "softcap", "identity") == {}
    elsewhere(monkeypatch, softcap="another")
    assert "no cache would hit" in of(cpu(passes=(right,)), "softcap", "identity")["identity"]


def test_cases_are_the_same_each_time_and_named_well(plain: Device) -> None:
    ids = [case.id for case in area.collect(plain, ConformanceProfile())]
    assert ids == [case.id for case in area.collect(cpu(), ConformanceProfile())]
    assert len(set(ids)) == len(ids) and all(name == name.lower() and " " not in name for name in ids)
    assert {f"passes/{name}/{kind}" for name in NAMES for kind in KINDS} <= set(ids)
    assert {f"passes/pipeline/{name}/float32" for name in CORPUS} <= set(ids)


# --- wrong passes of a device


@pytest.mark.cases(2)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("run", "kind", "reason"),
    [
        (wrong.never_fires, "fires", "matches nothing in"),
        (wrong.scaled, "float32", "error over bound"),
        (wrong.scaled, "bfloat16", "error over bound"),
        (wrong.claims_all, "fires", "left the graph as it was"),
        (wrong.claims_one_more, "fires", "replace 3 sites"),
        (wrong.claims_nothing, "fires", "reports no match and changed the graph"),
        (wrong.names_nowhere, "fires", "neither a module nor a node"),
        (wrong.greedy, "near-miss", "error over bound"),
        (wrong.drops_write, "float32", "at input l_model_"),
        (wrong.drops_write, "near-miss", "written at the end"),
        (wrong.unguarded, "near-miss", "is written after"),
        (wrong.drifts, "fires", "a second run breaks"),
        (wrong.raises, "fires", "KeyError"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_pass_fails(run: Callable[..., PassResult], kind: str, reason: str) -> None:
    found = of(cpu(passes=(wrong.softcaps(run),)), "softcap", kind)
    assert reason in found.get(kind, "nothing failed")


def test_programs_with_a_wrong_pass_fail() -> None:
    name = "passes/pipeline/soft-cap/float32"
    assert (
        "results: program against the model: output 0"
        in failures(cpu(passes=(wrong.softcaps(wrong.scaled),)), name)[name][0]
    )
    assert "writes: l_model_" in failures(cpu(passes=(wrong.softcaps(wrong.drops_write),)), name)[name][0]


@pytest.mark.slow
def test_a_tiny_model_with_a_wrong_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    monkeypatch.setattr(core.compilation.rewriting, "COMMON_PASSES", injected(COMMON_PASSES, planted("norm-eps")))
    (found,) = failures(cpu(), "passes/models/llama").values()
    assert any("pass lift_rms_norm: at model.layers." in reason for reason in found)


@pytest.mark.usefixtures("few")
def test_what_never_fires_says_what_was_tried_and_what_to_do() -> None:
    found = of(cpu(passes=(wrong.softcaps(wrong.never_fires),)), "softcap", "fires")["fires"]
    assert all(name in found for name in CORPUS) and "declare in Pass(examples=...)" in found


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_broken_promise_fails() -> None:
    device = cpu(passes=(wrong.softcaps(wrong.right, expect=7),))
    assert "owes 7 matches by its own `expect`" in of(device, "softcap", "fires")["fires"]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("norm-eps", "rms-norm"),
        ("add-norm-residual", "residual-norm"),
        ("gate-half", "gated-mlp"),
        ("rotary-style", "rotary-halves"),
        ("attention-scale", "attention"),
        ("cache-write", "cached-attention"),
        ("route-scale", "router"),
        ("merged-slices", "linears"),
        ("no-op-eps", "no-ops"),
        ("cse-write", "repeats"),
    ],
)
def test_a_planted_mistake_of_a_common_pass_fails(name: str, sample: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, sample)
    mistaken = planted(name)
    monkeypatch.setattr(core.compilation.rewriting, "COMMON_PASSES", injected(COMMON_PASSES, mistaken))
    assert set(of(cpu(), mistaken.name, "float32")) == {"float32"}


@pytest.mark.usefixtures("few")
def test_an_identity_that_changes_fails() -> None:
    class Restless(Pass):
        def uuid(self) -> str:
            return str(id(self))

    restless = Restless(name="softcap", run=wrong.right, owner="acme")
    assert "different uuids" in of(cpu(passes=(restless,)), "softcap", "identity")["identity"]


@pytest.mark.usefixtures("few")
def test_an_identity_without_its_parameters_fails() -> None:
    class Blind(Pass):
        def uuid(self) -> str:
            return self.name

    device = cpu(passes=(Blind(name="softcap", run=wrong.right, owner="acme", params={"cap": 3.0}),))
    assert "the same for cap=3.0 and cap=4.0" in of(device, "softcap", "identity")["identity"]
