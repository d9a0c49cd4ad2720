"""core/compilation/cache/source.py: the digest of a package follows what is loaded, also when that is done again."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from core.common.ops.implementation import OpImplementation
from tests.compilation.cache.cached_model import assert_miss, assert_warm, cache_of, start

RELOADS = """
import importlib, sys
import core
from core.compilation.cache.source import source_digest
import reloaded.kernels

def edit(number):
    with open(reloaded.kernels.__file__, "w") as file:
        file.write(f"X = {number}\\n")

found = [source_digest("reloaded")]
if sys.argv[1] == "reads":
    importlib.reload(reloaded.kernels)
    found.append(source_digest("reloaded"))
else:
    edit(2)
    found.append(source_digest("reloaded"))
    importlib.reload(reloaded.kernels)
    found.append(source_digest("reloaded"))
    found.append(source_digest("reloaded"))
    edit(3)
    del sys.modules["reloaded.kernels"]
    found.append(source_digest("reloaded"))
    import reloaded.kernels
    found.append(source_digest("reloaded"))
print(*found)
"""


def digests(folder: Path, what: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-c", RELOADS, what]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.slow
def test_the_digest_follows_what_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "reloaded").mkdir()
    (tmp_path / "reloaded" / "__init__.py").write_text("")
    (tmp_path / "reloaded" / "kernels.py").write_text("X = 1\n")
    time.sleep(0.1)
    plain = digests(tmp_path, "reads")
    assert len(set(plain)) == 1  # loaded again as it was
    first, edited, loaded, again, left, third = digests(tmp_path, "edits")
    assert first == edited == plain[0] and loaded == again == left
    assert len({first, loaded, third}) == 3
    # What an edited process runs can't be told from its files by another.
    assert digests(tmp_path, "reads")[0] not in (first, loaded, third)


KERNELS = """
from torch.nn import functional as F

def act(gate, up, **_):
    return F.silu(gate) * up

def condition(call):
    return {reason!r}
"""


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "kernels_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder / "acts.py"
    for name in [name for name in sys.modules if name.startswith("kernels_of_a_test")]:
        del sys.modules[name]


def compiled(module: Any) -> Any:
    ops = (OpImplementation(op="core::gated_activation", name="own", fn=module.act, condition=module.condition),)
    return start(Gated().eval(), {"ops": ops}, disable_passes=("merge_linears",), enable_passes=())


@pytest.mark.usefixtures("cache_folder")
def test_a_plugin_that_was_edited_and_loaded_again_gets_entries_of_its_own(kernels: Path) -> None:
    kernels.write_text(KERNELS.format(reason="not yet"))
    module = importlib.import_module("kernels_of_a_test.acts")
    assert [each.implementation for each in compiled(module).report().traces[0].ops] == ["original"]
    assert_warm(compiled(module))
    kernels.write_text(KERNELS.format(reason=None) + "# longer: another size, so that no bytecode is taken for it\n")
    module = importlib.reload(module)
    program = compiled(module)
    assert [each.implementation for each in program.report().traces[0].ops] == ["own"]
    assert_miss(cache_of(program), "source: kernels_of_a_test")
    assert_warm(compiled(module))
