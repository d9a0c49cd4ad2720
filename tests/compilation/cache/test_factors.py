"""core/compilation/cache/factors.py, and what a trace read: each thing that a graph depends on is named on a miss."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import InputSpec
from core.common.lowering import Lowerings, inline
from core.compilation.cache.factors import runtime_packages, version_factors
from core.host.selection import select_device
from tests.compilation.cache import cached_model
from tests.compilation.cache.cached_model import TABLE, Block, Model, X, assert_miss, cache_of, counts, look, start

pytestmark = pytest.mark.usefixtures("cache_folder")


def change_shift(model: Model) -> None:
    model.blocks[0].shift = 2.5


def change_class_constant(_: Model) -> None:
    Block.factor = 0.25


def change_method(_: Model) -> None:
    def scaled(self: Block, y: Tensor) -> Tensor:
        return y * cached_model.SCALE - self.shift

    Block.scaled = scaled  # type: ignore[method-assign]


def change_forward_of_one(model: Model) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        return self.left(x) - self.right(x)

    model.blocks[0].forward = MethodType(forward, model.blocks[0])


def change_global(_: Model) -> None:
    cached_model.SCALE = 3.0


def change_function(_: Model) -> None:
    cached_model.helper = torch.exp  # type: ignore[assignment]


def change_registry(_: Model) -> None:
    TABLE["act"] = torch.tanh


def change_hook(model: Model) -> None:
    model.blocks[0].left.register_forward_hook(lambda module, args, output: output * 2)


def change_torch_function(_: Model) -> None:
    F.silu = F.gelu


def change_dtype(model: Model) -> None:
    model.blocks[0].offset = model.blocks[0].offset.to(torch.float64)


def change_tie(model: Model) -> None:
    model.blocks[0].right.weight = model.blocks[0].left.weight


def change_layout(model: Model) -> None:
    weight = model.blocks[0].left.weight
    weight.data = weight.data.t().contiguous().t()


def change_submodule(model: Model) -> None:
    model.blocks[0].right = nn.Sequential(nn.Linear(8, 16), nn.Identity())


CHANGES: dict[Callable[[Model], None], str] = {
    change_shift: "values: main.blocks.0.shift: 1.5 -> 2.5",
    change_class_constant: "['factor']: 0.5 -> 0.25",
    change_method: "values: main.blocks.0: a tests.compilation.cache.cached_model:B",
    change_forward_of_one: "own(main.blocks.0, 'forward'): False -> True",
    change_global: "cached_model.SCALE: 2.0 -> 3.0",
    change_function: "helper",
    change_registry: "TABLE",
    change_hook: "_forward_hooks",
    change_torch_function: "silu",
    change_dtype: "blocks.0.offset",
    change_tie: "blocks.0.right.weight",
    change_layout: "blocks.0.left.weight",
    change_submodule: "blocks.0.right",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.usefixtures("made_cache")
def test_whatever_the_model_reads_makes_a_miss(
    change: Callable[[Model], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Block, "factor", Block.factor)  # each is put back after the test
    monkeypatch.setattr(Block, "scaled", Block.scaled)
    monkeypatch.setitem(TABLE, "act", TABLE["act"])
    monkeypatch.setattr(cached_model, "SCALE", cached_model.SCALE)
    monkeypatch.setattr(cached_model, "helper", cached_model.helper)
    monkeypatch.setattr(F, "silu", F.silu)
    assert look().state == "hit"
    model = Model().eval()
    change(model)
    with caplog.at_level(logging.INFO, logger="core.cache"):
        report = look(model)
    assert_miss(report, CHANGES[change])
    assert re.search(r"\d factors? differs?:", caplog.text) and len(report.differences) <= 25


@pytest.mark.cases(2)
@pytest.mark.usefixtures("made_cache")
@pytest.mark.parametrize("change", [change_forward_of_one, change_hook, change_tie])
def test_a_changed_model_computes_what_it_does(change: Callable[[Model], None]) -> None:
    model = Model().eval()
    change(model)
    expected = model(X)["y"]
    program = start(model)
    assert counts(program)["traces"] == 1
    torch.testing.assert_close(program(x=X)["y"], expected)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "buckets": ({"buckets": [4, 8, 16]}, "buckets: main"),
    "inputs": ({"inputs": {"x": InputSpec(("n", 8), torch.float32, padding="edge")}}, "inputs: x"),
    "passes": ({"disable_passes": ("merge_linears",)}, "passes: "),
    "strict": ({"strict": True}, "options: strict"),
    "guards": ({"guards": {"flag": (True, False)}}, "guards: main"),
    "lowering": ({"lowering": "inductor"}, "options: lowering: inline -> inductor"),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("made_cache")
def test_each_setting_is_a_factor(name: str) -> None:
    options, named = SETTINGS[name]
    if name == "lowering":  # its compiler has no say here
        both = Lowerings(available={"inline": inline, "inductor": inline}, default="inline")
        options = {**options, "device": {"lowerings": both}}
    assert_miss(look(**options), named)


@pytest.mark.usefixtures("made_cache")
def test_another_device_is_a_miss_that_names_no_entry() -> None:
    report = look(device={"name": "acme"})
    assert (report.state, report.reason) == ("miss", "no entry of this model on this device yet")


@pytest.mark.slow
@pytest.mark.usefixtures("made_cache")
def test_torchs_own_state_and_versions_are_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "highest")
    try:
        assert_miss(look(), "torch: matmul precision")
    finally:
        torch.set_float32_matmul_precision(before)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
        assert_miss(look(), "torch: backends")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_miss(look(), "torch: autocast: off -> torch.bfloat16")
    assert look().state == "hit"
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert_miss(look(), "versions: torch")


@pytest.mark.usefixtures("made_cache")
def test_the_source_of_core_and_of_the_plugin_is_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.compilation.cache import factors

    digest = factors.source_digest
    monkeypatch.setattr(factors, "source_digest", lambda package: digest(package) + "edited")
    assert_miss(look(), "source: core")
    assert any("source: core_cpu" in line for line in look().differences)


@pytest.mark.usefixtures("made_cache")
def test_a_miss_names_the_other_checkout_and_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from core import errors
    from core.compilation.cache import factors, program_cache
    from core.compilation.cache.differences import Place
    from core.compilation.cache.source import source_place

    own = source_place("core")
    assert own.folder == str(Path(errors.__file__).parent)
    assert own.files.keys() >= {"device.py", "compilation/cache/source.py"}
    digest = factors.source_digest
    monkeypatch.setattr(factors, "source_digest", lambda package: digest(package) + "x" * (package == "core"))
    other = Place("/other/core", {**own.files, "device.py": "edited"})
    monkeypatch.setattr(program_cache, "source_place", {"core": other}.get)
    said = f"source: core: that entry is of {own.folder}, 1 file differs: device.py"
    assert look().reason.endswith(said) and look().reason.startswith("1 factor differs from ")


@pytest.mark.slow
def test_an_edited_forward_misses(tmp_path: Path) -> None:
    code = "from torch import nn\nclass Edited(nn.Module):\n    def forward(self, x):\n        return x * {}\n"

    def load(number: int) -> nn.Module:
        space: dict[str, Any] = {"__name__": "edited_model"}
        exec(compile(code.format(number), "edited_model.py", "exec"), space)
        module: nn.Module = space["Edited"]()
        return module

    start(load(2), buckets=[4])
    assert look(load(2), buckets=[4]).state == "hit"
    program = start(load(3), buckets=[4])
    assert_miss(cache_of(program), "values: main: a edited_model:Edited (code ")
    assert torch.equal(program(x=X), X * 3)


@pytest.mark.slow
def test_what_a_function_closes_over_is_a_factor() -> None:
    def scaled_by(number: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * number

    start(scaled_by(2.0))
    assert look(scaled_by(2.0)).state == "hit"
    program = start(scaled_by(3.0))
    assert_miss(cache_of(program), "main.__closure__[0].cell_contents: 2.0 -> 3.0")
    assert torch.equal(program(x=X), X * 3)


def test_arguments_of_a_partial_are_factors() -> None:
    def scaled(x: Tensor, *, by: float) -> Tensor:
        return x * by

    start(functools.partial(scaled, by=2.0))
    assert_miss(look(functools.partial(scaled, by=3.0)), "keywords['by']: 2.0 -> 3.0")


LATE_EDIT = """
import sys, time
import core
import edited_plugin
if sys.argv[1] == "edits":
    time.sleep(0.1)
    with open(edited_plugin.__file__, "a") as file:
        file.write("X = 2\\n")
from core.compilation.cache.source import source_digest
print(source_digest("edited_plugin"))
"""


@pytest.mark.slow
def test_source_that_changed_after_it_was_loaded_stands_for_nothing_else(tmp_path: Path) -> None:
    """A plugin that is edited before its first compile still runs as it was, and may not count as what it is now."""
    (tmp_path / "edited_plugin.py").write_text("X = 1\n")
    time.sleep(0.1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", LATE_EDIT]
    found = [
        subprocess.run([*command, what], env=environment, check=True, capture_output=True, text=True).stdout
        for what in ("edits", "reads")
    ]
    assert found[0] != found[1]


def test_a_runtime_that_extends_torch_counts_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    device = select_device("cpu")
    assert runtime_packages(device) == frozenset()
    vendor: Any = ModuleType("vendor_of_a_test")
    vendor.__version__ = "1.2"
    monkeypatch.setitem(sys.modules, "vendor_of_a_test", vendor)
    monkeypatch.setattr(torch, "get_device_module", lambda device: ModuleType("vendor_of_a_test.backend"))
    assert runtime_packages(device) == {"vendor_of_a_test"}
    before = version_factors("core", runtime_packages(device))
    assert before["package vendor_of_a_test"] == "1.2"
    vendor.__version__ = "1.3"
    assert version_factors("core", runtime_packages(device)) != before


def test_tools_that_are_installed_later_change_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=2", "kernels-of-acme>=1; extra == 'acme'", "linter>=1; extra == 'dev'", 'server; extra == "serve"']
    monkeypatch.setattr("core.compilation.cache.factors.metadata.requires", lambda name: lines)
    found = version_factors("acme-device")
    assert "numpy" in found and found["kernels-of-acme"] == "(not installed)"
    assert "linter" not in found and "server" in found  # a vendor may serve its kernels under any other name
    assert "server" not in version_factors("core")


@pytest.mark.slow
def test_whether_a_program_runs_before_it_is_compiled_is_no_factor() -> None:
    start()
    assert look(background=True).state == "hit"
