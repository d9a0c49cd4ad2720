"""core/compilation/cache/artifacts.py: what a lowering made of a graph is found for an equal graph, and no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import Program
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings, Unavailable, inline
from core.compilation.cache.artifacts import check
from core.compilation.cache.store import Store
from core.errors import LoweringError
from tests.compilation.cache.cached_model import Model, X, cache_of, start
from tests.support import refused

pytestmark = pytest.mark.usefixtures("cache_folder")


@dataclass
class Compiler:
    """A lowering that writes a file of each graph, and runs the graph itself. flags: of which the file depends."""

    flags: str = "-O2"
    made: list[Path] = field(default_factory=list)
    loaded: list[Path] = field(default_factory=list)
    fails: str = ""

    def __call__(self, request: LoweringRequest) -> FlatCallable:
        request.artifacts.use({"flags": self.flags}, self.make, self.load)
        request.note(f"compiled with {self.flags}")
        return inline(request)

    def make(self, folder: Path) -> None:
        assert list(folder.iterdir()) == []
        if self.fails == "make":
            raise RuntimeError("no compiler")
        self.made.append(folder)
        (folder / "graph.so").write_text(f"code by {self.flags}")

    def load(self, folder: Path) -> None:
        if self.fails == "unavailable":
            raise Unavailable("no library")
        if self.fails == "load" and not self.made:
            raise RuntimeError("not a shared object")
        assert (folder / "graph.so").read_text() == f"code by {self.flags}"
        self.loaded.append(folder)


def begin(compiler: Compiler, model: Any = None, **options: Any) -> Program:
    """Start a model of two buckets by this lowering, and time no implementations, whose times would be kept too."""
    lowerings = Lowerings(available={"acme": compiler}, default="acme")
    return start(model, device={"lowerings": lowerings}, lowering="acme", measure=False, **options)


def kept(cache_folder: Path) -> list[Path]:
    return sorted((cache_folder / "kernels" / "lowered").glob("*"))


@pytest.mark.slow
def test_a_second_start_loads_what_the_first_one_made(cache_folder: Path) -> None:
    cold, warm = Compiler(), Compiler()
    begin(cold)
    assert len(cold.made) == len(kept(cache_folder)) == 2 and not any(path.exists() for path in cold.made)
    program = begin(warm)
    assert warm.made == [] and sorted(warm.loaded) == kept(cache_folder)
    assert cache_of(program).state == "hit"
    assert program.report().notes == ("compiled with -O2",)
    assert Store.of_user().kernel_bytes()["lowered"] > 2 * len("code by -O2")
    Store.of_user().clear()
    assert kept(cache_folder) == []


@pytest.mark.slow
def test_other_weights_find_it_and_give_their_own_numbers() -> None:
    begin(Compiler())
    other, warm = Model().eval(), Compiler()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    expected = other(X)["y"].clone()
    program = begin(warm, other)
    assert warm.made == []
    torch.testing.assert_close(program(x=X)["y"], expected)


class Wider(Model):
    """The same code, and weights of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor, flag: bool = False) -> dict[str, Tensor]:
        return super().forward(x.double(), flag)


def _other_switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", not torch.backends.mkldnn.enabled)
    return {}


OTHERS: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "the lowering's own factors": lambda _: {"compiler": Compiler(flags="-O3")},
    "the sizes": lambda _: {"buckets": [5, 9]},
    "the graph": lambda _: {"disable_passes": ("merge_linears",), "enable_passes": ()},
    "dtypes": lambda _: {"model": Wider().eval()},
    "torch's switches": _other_switches,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("which", OTHERS)
def test_what_is_compiled_otherwise_is_not_taken(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(Compiler())
    given = OTHERS[which](monkeypatch)
    compiler = given.pop("compiler", None) or Compiler()
    begin(compiler, given.pop("model", None), **given)
    assert len(compiler.made) == 2


def _overwrite(path: Path) -> None:
    (path / "graph.so").write_text("other code")


def _truncate(path: Path) -> None:
    (path / "checksums.json").write_text("{")


def _take_away(path: Path) -> None:
    (path / "graph.so").unlink()


def _exchange(path: Path) -> None:
    """Put the other bucket's files under this name."""
    other = next(each for each in path.parent.iterdir() if each != path)
    for name in ("graph.so", "factors.json", "checksums.json"):
        shutil.copy(other / name, path / name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("damage", [_overwrite, _truncate, _take_away, _exchange])
def test_a_damaged_one_is_told_and_made_anew(
    damage: Callable[[Path], None], cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(Compiler())
    path = kept(cache_folder)[0]
    damage(path)
    warm = Compiler()
    begin(warm)
    assert len(warm.made) == 1
    assert f"artefact {path.name[:12]} is not used and made anew" in caplog.text
    for each in kept(cache_folder):
        check(each)
    assert len(kept(cache_folder)) == 2


@pytest.mark.slow
def test_one_that_can_not_be_loaded_is_made_anew(caplog: pytest.LogCaptureFixture) -> None:
    begin(Compiler())
    warm = Compiler(fails="load")
    begin(warm, buckets=[4])
    assert len(warm.made) == 1 and "it can't be loaded: RuntimeError: not a shared object" in caplog.text


@pytest.mark.slow
def test_what_needs_something_that_is_missing_here_stays_and_is_not_made_anew(cache_folder: Path) -> None:
    begin(Compiler())
    before, later = kept(cache_folder), Compiler(fails="unavailable")
    with refused(LoweringError, "no library"):
        begin(later)
    assert later.made == [] and kept(cache_folder) == before


@pytest.mark.slow
def test_what_could_not_be_made_is_not_kept(cache_folder: Path) -> None:
    with refused(LoweringError, "no compiler"):
        begin(Compiler(fails="make"))
    assert kept(cache_folder) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("level", ["", "kernels", "kernels/lowered", "each", "file"])
def test_code_is_not_loaded_from_where_others_may_write(
    level: str, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(Compiler(), buckets=[4])
    (path,) = kept(cache_folder)
    places = {"each": path, "file": path / "graph.so"}
    places.get(level, cache_folder / level).chmod(0o777)
    warm = Compiler()
    program = begin(warm, buckets=[4])
    assert len(warm.made) == 1 and "others may write to" in caplog.text
    assert not warm.made[0].is_relative_to(cache_folder)
    torch.testing.assert_close(program(x=X)["y"], Model().eval()(X)["y"])


@pytest.mark.slow
def test_files_are_their_users_alone(cache_folder: Path) -> None:
    begin(Compiler(), buckets=[4])
    (path,) = kept(cache_folder)
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o600}
    assert {each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent.parent)} == {0o700}


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["option", "variable", "verify"])
def test_nothing_is_read_or_kept_where_the_cache_is_off(
    way: str, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(Compiler(), buckets=[4])
    (path,) = kept(cache_folder)
    (path / "graph.so").write_text("not even looked at")
    given: dict[str, Any] = {
        "option": {"cache": False},
        "verify": {"verify": "full", "examples": {"main": [{"x": X}]}},
    }.get(way, {})
    if way == "variable":
        monkeypatch.setenv("CORE_CACHE", "0")
    compiler = Compiler()
    begin(compiler, buckets=[4, 8], **given)
    assert len(compiler.made) == 2 and not any(folder.is_relative_to(cache_folder) for folder in compiler.made)
    assert kept(cache_folder) == [path] and (path / "graph.so").read_text() == "not even looked at"


class Calls(nn.Module):
    """Calls an op that its own library takes apart while a graph is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.artifacts_test.twice(x) + 1  # type: ignore[no-any-return]


@pytest.fixture
def foreign_op() -> Iterator[None]:
    library = torch.library.Library("artifacts_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    yield
    library._destroy()


def test_a_graph_that_runs_code_of_others_while_it_is_compiled_is_not_kept(
    foreign_op: None, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The code is no factor: it may be another one at the next start."""
    for _ in range(2):
        compiler = Compiler()
        begin(compiler, Calls(), buckets=[4])
        assert len(compiler.made) == 1
    assert kept(cache_folder) == []
    assert "artifacts_test::twice, whose fake kernel is neither torch's nor the device's plugin's" in caplog.text


RACE = """
import sys, time
from pathlib import Path
from tests.compilation.cache import test_artifacts as tests

class Slow(tests.Compiler):
    def make(self, folder):
        super().make(folder)
        Path(sys.argv[1]).touch()
        while not Path(sys.argv[2]).exists():
            time.sleep(0.01)

program = tests.begin(Slow(), buckets=[4])
assert program.report().cache.state == "miss"
"""


@pytest.mark.slow
def test_two_processes_make_the_same_at_once(cache_folder: Path, tmp_path: Path) -> None:
    marks = [str(tmp_path / name) for name in ("one", "two")]
    both = [subprocess.Popen([sys.executable, "-c", RACE, *each]) for each in (marks, marks[::-1])]
    assert [each.wait(timeout=120) for each in both] == [0, 0]
    (path,) = kept(cache_folder)
    check(path)
    warm = Compiler()
    begin(warm, buckets=[4])
    assert warm.made == []
