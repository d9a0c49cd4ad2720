"""core/compilation/cache/program_cache.py: a second start takes everything from disk, or says why not, and trusts
nothing it did not write.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import core
from core.common.inductor import INLINE_AND_INDUCTOR
from core.common.ops.implementation import OpImplementation
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass, PassTraits
from core.common.passes.pass_guards import Guards
from core.common.passes.results import PassResult
from core.compilation.cache.entry import read_factors
from core.compilation.cache.program_cache import ProgramCache
from core.compilation.cache.store import Store
from core.errors import UsageError
from tests.compilation.cache.cached_model import (
    NONE,
    ROWS,
    Model,
    X,
    assert_miss,
    assert_warm,
    cache_of,
    counts,
    look,
    start,
)
from tests.recording import acme
from tests.support import refused

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.slow
def test_a_second_start_runs_no_trace_and_no_pass() -> None:
    cold, warm = start(), start()
    assert cache_of(cold).state == "miss" and counts(cold)["traces"] == 1 and counts(cold)["passes"] > 5
    assert_warm(warm)
    assert warm.report().num_captures == cold.report().num_captures == 2
    for size in (1, 3, 4, 7, 8):
        x = torch.randn(size, 8)
        ours, theirs = warm(x=x), cold(x=x)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_the_report_still_tells_what_passes_did() -> None:
    cold, warm = start().report(), start().report()
    assert [trace.cached for trace in warm.traces] == [True]
    for ours, theirs in zip(warm.traces[0].passes, cold.traces[0].passes, strict=True):
        assert (ours.name, ours.matched, ours.sites, ours.near_misses) == (
            *(theirs.name, theirs.matched, theirs.sites, theirs.near_misses),
        )
    assert {each.name: each.matched for each in warm.traces[0].passes}["merge_linears"] == 1
    assert warm.traces[0].ops == cold.traces[0].ops and warm.traces[0].buckets == cold.traces[0].buckets
    assert "from the cache" in str(warm) and "hit" in str(warm)
    document = json.loads(json.dumps(warm.to_json()))
    assert document["counters"] == {**NONE, "captures": 2} and document["cache"]["state"] == "hit"


@pytest.mark.slow
def test_weights_of_a_warm_start_are_its_own() -> None:
    start()
    other = Model().eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    expected = {key: value.clone() for key, value in other(X).items()}
    warm = start(other)
    assert_warm(warm)
    torch.testing.assert_close(warm(x=X)["y"], expected["y"])
    cold = start()
    assert_warm(cold)
    cold.load_weights(other.state_dict())
    torch.testing.assert_close(cold(x=X)["y"], expected["y"])
    with torch.no_grad():
        other.blocks[0].left.weight.zero_()  # bound, and joined: still seen by the graph
    torch.testing.assert_close(warm(x=X)["y"], other(X)["y"])
    assert other.blocks[0].left.weight.untyped_storage().data_ptr() == (
        other.blocks[0].right.weight.untyped_storage().data_ptr()
    )


@pytest.mark.slow
def test_a_graph_in_pieces_is_cut_at_the_same_places() -> None:
    options = core.CompileOptions(mode="piecewise", cache=True, break_at=("torch.nn.functional.silu",))
    cold, warm = (core.compile(Model().eval(), acme(), inputs=ROWS, buckets=[4], options=options) for _ in range(2))
    assert_warm(warm)
    (ours,), (theirs,) = warm.report().buckets, cold.report().buckets
    assert ours.num_graphs == theirs.num_graphs and ours.eager == theirs.eager == ("torch.nn.functional.silu",)
    assert torch.equal(warm(x=X)["y"], cold(x=X)["y"])


@pytest.mark.slow
def test_inductors_kernels_come_from_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    device = {"lowerings": INLINE_AND_INDUCTOR}
    cold, warm = (start(lowering="inductor", buckets=[4], device=device) for _ in range(2))
    assert counts(cold)["kernels"] == 1
    assert_warm(warm)
    assert torch.equal(warm(x=X)["y"], cold(x=X)["y"])


@pytest.mark.slow
def test_off_reads_and_writes_nothing(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_of(start(cache=False)).state == "off"
    monkeypatch.setenv("CORE_CACHE", "0")
    assert cache_of(start()).state == "off"
    monkeypatch.setenv("CORE_CACHE", "1")
    assert cache_of(start(mode="off")).state == "off"
    assert cache_of(start(verify="sample", examples=[{"x": X}])).state == "off"
    assert not cache_folder.exists()


@pytest.mark.slow
def test_a_content_that_a_pass_has_read_is_a_factor() -> None:
    """A pass that folds a weight's value into the graph serves equal weights only."""

    def fold(context: PassContext) -> PassResult:
        assert context.constants is not None
        for node in list(context.graph.nodes):
            value = context.constants.value(node)
            if value is not None and value.numel() == 1:
                node.replace_all_uses_with(float(value))  # type: ignore[arg-type]
                return PassResult(matched=1)
        return PassResult(matched=0)

    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.register_buffer("by", torch.tensor(by))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    device = {"passes": (Pass(name="fold", run=fold, guards=Guards(constants=True), owner="acme 1"),)}
    cold, warm = (start(Scaled(2.0), device) for _ in range(2))
    assert_warm(warm)
    for program in (cold, warm):
        with refused(UsageError, "'by' can't change, as passes made the graphs by its values"):
            program.load_weights({"by": torch.tensor(3.0)})
        program.load_weights({"by": torch.tensor(2.0)})
        assert torch.equal(program(x=X), X * 2)
    other = start(Scaled(3.0), device)
    assert torch.equal(other(x=X), X * 3)
    assert counts(other)["traces"] == 1
    assert_miss(cache_of(other), "content(main.by)")


@pytest.mark.slow
def test_the_codes_that_a_pass_may_move_are_still_told() -> None:
    def run(context: PassContext) -> PassResult:
        return PassResult(matched=0)

    device = {"passes": (Pass(name="looks", run=run, owner="acme 1", traits=PassTraits(codes=("acme::quantize",))),)}
    cold, warm = (start(device=device) for _ in range(2))
    assert_warm(warm)
    for program in (cold, warm):
        (report,) = (each for each in program.report().traces[0].passes if each.name == "looks")
        assert report.codes == ("acme::quantize",)


@pytest.mark.slow
def test_what_can_not_be_written_down_is_not_cached(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def computed(context: PassContext) -> PassResult:
        assert context.constants is not None
        linear = next(node for node in context.graph.nodes if "linear" in str(node.target))
        weight = context.constants.value(linear.args[1])
        assert weight is not None
        linear.args = (linear.args[0], context.constants.add(context.graph, "twice", weight * 2, linear.args[1]))
        return PassResult(matched=1)

    device = {
        "passes": (
            Pass(name="twice", run=computed, guards=Guards(constants=True), traits=PassTraits(reads_content=False)),
        )
    }
    for _ in range(2):
        program = start(nn.Linear(8, 8, bias=False).eval(), device, inputs={"input": ROWS["x"]})
        assert cache_of(program).state == "refused" and counts(program)["traces"] == 1
        assert "none of the model's" in cache_of(program).reason
    assert "not used for this program" in caplog.text and not Store(cache_folder).entries()


class Guarded:
    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"{name} is not for you")


@pytest.mark.usefixtures("made_cache")
@pytest.mark.parametrize("make", [torch.Generator, Guarded])
def test_state_that_the_trace_does_not_read_may_be_of_any_kind(make: Callable[[], Any]) -> None:
    model = Model().eval()
    model.blocks[0].unread = make()
    assert look(model).state == "hit"


def test_a_model_that_reads_what_can_not_be_compared_costs_only_the_cache() -> None:
    program = start(lambda x: x * (1 + id(X) * 0))
    assert cache_of(program).state == "refused" and "the model reads id()" in cache_of(program).reason
    assert torch.equal(program(x=X), X)


@pytest.mark.slow
def test_hooks_count_by_their_order_and_not_by_their_number() -> None:
    def hooked(*kwargs: bool) -> Model:
        model = Model().eval()
        for with_kwargs in kwargs:
            hook: Any = (lambda m, a, k, o: o * 2) if with_kwargs else (lambda m, a, o: o * 2)
            model.blocks[0].left.register_forward_hook(hook, with_kwargs=with_kwargs)
        return model

    start(hooked(False, True), buckets=[4])
    assert_warm(start(hooked(False, True), buckets=[4]))
    assert look(hooked(True, False), buckets=[4]).state == "miss"
    assert look(hooked(True), buckets=[4]).state == "miss"


@pytest.mark.slow
def test_what_changes_between_trace_and_entry_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by a run of the model that captures another phase without a trace."""
    model, write = Model().eval(), ProgramCache.save

    def save(cache: ProgramCache) -> None:
        model.blocks[0].shift = 9.0
        write(cache)

    monkeypatch.setattr(ProgramCache, "save", save)
    assert "main.blocks.0.shift was 1.5 when it was traced, and is 9.0 now" in cache_of(start(model)).reason


@pytest.mark.slow
def test_what_a_model_imports_when_it_runs_is_not_taken_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that the trace has loaded first holds values that no factor tells."""
    (tmp_path / "module_of_this_test.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Importing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            from module_of_this_test import SCALE

            return x * SCALE  # type: ignore[no-any-return]

    assert cache_of(start(Importing())).state == "miss"
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["module_of_this_test"], "SCALE", 3.0)
        program = start(Importing())
    assert_miss(cache_of(program), "module_of_this_test.SCALE: 2.0 -> 3.0")
    assert torch.equal(program(x=X), X * 3)
    del sys.modules["module_of_this_test"]
    assert_warm(start(Importing()))  # which has imported it, as the model does
    monkeypatch.delitem(sys.modules, "module_of_this_test")


@pytest.mark.slow
def test_an_implementation_of_an_op_is_a_factor_and_kept() -> None:
    def act(gate: Tensor, up: Tensor, **_: Any) -> Tensor:
        return F.silu(gate) * up

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.gate(x)) * self.up(x)

    ops = (OpImplementation(op="core::gated_activation", name="own", fn=act),)
    options = {"disable_passes": ("merge_linears",), "enable_passes": ()}
    cold, warm = (start(Gated().eval(), {"ops": ops}, **options) for _ in range(2))
    assert_warm(warm)
    assert [choice.implementation for choice in warm.report().traces[0].ops] == ["own"]
    assert warm.report().traces[0].ops == cold.report().traces[0].ops
    assert_miss(look(Gated().eval(), {"ops": ()}, **options), "implementations")


def damage_factors(entry: Path) -> None:
    data = bytearray((entry / "factors.json").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "factors.json").write_bytes(data)


def damage_graphs(entry: Path) -> None:
    data = bytearray((entry / "graphs.json").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "graphs.json").write_bytes(data)


def truncate(entry: Path) -> None:
    path = entry / "graphs.json"
    path.write_bytes(path.read_bytes()[:100])


def half_written(entry: Path) -> None:
    (entry / "checksums.json").unlink()


def emptied(entry: Path) -> None:
    for path in entry.iterdir():
        path.unlink()


def foreign(entry: Path) -> None:
    """Put a whole, valid entry of another program under this name."""
    other = Store(entry.parent.parent)
    path = other.write("f" * 32, {"model": {"main": "another"}}, {"names": [], "values": {}}, {"phases": []})
    for file in path.iterdir():
        os.replace(file, entry / file.name)


def nonsense(entry: Path) -> None:
    """Write what has the right checksums and factors, and is no graph."""
    rewrite(entry, {"phases": [{"phase": "main", "mode": "compile", "graphs": [{}]}]})


def no_graphs(entry: Path) -> None:
    """Write what has the right checksums and factors, and no graphs."""
    rewrite(entry, {})


def rewrite(entry: Path, graphs: dict[str, Any]) -> None:
    store, key = Store(entry.parent.parent), entry.name.partition("-")[2]
    factors, reads = read_factors(entry), store.reads(entry.name)
    half_written(entry)
    store.write(key, factors, reads, graphs)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "damage", [damage_factors, damage_graphs, truncate, half_written, emptied, foreign, nonsense, no_graphs]
)
def test_an_entry_that_is_not_as_written_is_made_anew(
    damage: Callable[[Path], None], made_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (entry,) = Store(made_cache).entries()
    damage(entry.path)
    report = look()
    assert report.state == "miss" and report.reason and "is not used and made anew" in caplog.text


@pytest.mark.slow
def test_an_entry_is_made_anew_once(made_cache: Path) -> None:
    (entry,) = Store(made_cache).entries()
    truncate(entry.path)
    again = start()
    assert counts(again)["traces"] == 1
    warm = start()
    assert_warm(warm)
    assert torch.equal(again(x=X)["y"], warm(x=X)["y"])


def test_a_folder_that_can_not_be_written_costs_only_the_cache(cache_folder: Path) -> None:
    cache_folder.write_text("a file where the folder should be")
    program = start()
    assert cache_of(program).state == "refused" and "can't be written" in cache_of(program).reason
    assert program(x=X)["y"].shape == (3, 16)


def test_a_folder_that_others_may_write_is_not_trusted(made_cache: Path) -> None:
    (made_cache / "graphs-2").chmod(0o777)
    assert look().state == "refused" and "others may write" in look().reason
    (made_cache / "graphs-2").chmod(0o700)
    assert look().state == "hit"
