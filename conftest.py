"""For all tests: Triton's interpreter where there is no GPU, a collector that skips old objects, a limit of time, a
folder for the kernels of the cpu plugin, no compile cache of the user's, and which worker runs which files."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from core.common import collector
from core.compilation.cache.folders import default_folder
from core.host import discovery, plugin_metadata
from core.host.plugin_metadata import PluginMetadata
from core_cuda.probe import probe

# As `make` has it, whatever the shell says: else each of hundreds of processes compiles what it imports of torch and of
# transformers anew, which is ten seconds of its start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Here and not beside the kernels' tests: Triton decides it when it is imported, and torch may import it earlier.
if not probe().available:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests of the compile cache have folders of their own, where kernels would be compiled again for each.
os.environ.setdefault("CORE_CPU_KERNELS_DIR", str(default_folder() / "kernels" / "core_cpu"))

# Engines cache unless told otherwise, and the fixtures of a module are made before those of a test: they would look
# through all that the user's own cache holds, and add to it. Tests of the compile cache switch it on.
os.environ["CORE_CACHE"] = "0"


@pytest.fixture(autouse=True, scope="session")
def _kernels_compiled(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of the cpu plugin, where nobody has, before the time of a test counts; not for a GPU's tests
    alone, since time on a GPU is dear."""
    if all(item.get_closest_marker("gpu") for item in request.session.items):
        return
    from core_cpu import extension, plugin

    plugin.core_register_ops()  # declares what the kernels are loaded for
    if not extension.why_not():
        names = sorted(path.stem for path in extension.SOURCES.glob("*.cpp"))
        assert {extension.load(name) for name in _own_first(names)} == {""}


def _own_first(names: list[str]) -> list[str]:
    """Return the names with this worker's share first: workers that all began with the same file would wait for it."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % count
    return [name for share in range(count) for name in names[(first + share) % count :: count]]


@pytest.fixture(autouse=True)
def _little_to_collect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each capture has the collector run first: spare it what torch and the tests before have left in the process.

    So tests run as in a process that has frozen its objects itself, which nobody thaws. Counting these, to see that,
    takes 50 ms; a collection after a thaw, seconds.
    """
    if "nothing_frozen" not in request.fixturenames:
        monkeypatch.setattr(collector, "is_frozen", lambda: True)
        monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    gc.collect()
    gc.freeze()


LIMIT_S = 3.0
"""Most seconds of processor time, on a quiet machine, for a test that bears none of these marks, without fixtures."""
NOISE = 5.0
"""What the caches of a busy core, a worker that holds the objects of a thousand tests, and a machine with slower memory
than its loop tells make of that: on two cores of another AMD EPYC six tests that trace took 2.3 to 3.7 times the limit,
by the loop's measure, and pass where it was set."""
NUM_IMPORTS = 100
"""Modules that a test may import for the first time in its process, and still be judged."""
LOOP_S = 0.0235
"""Processor time of the loop below on the quiet machine that the limit is meant for (one core of an AMD EPYC)."""
DEAR = ("slow", "exhaustive", "interpreter", "gpu", "npu_sim", "ipex")


def _processor_s() -> float:
    """Return the processor time of this thread: a busy machine adds none, and neither do builds that an earlier test
    has left to threads and processes."""
    return time.thread_time()


def _slowness() -> float:
    """Return how much slower a fixed piece of work runs now than on a quiet machine: cores are shared by threads."""
    before = time.thread_time()
    sum(number * number for number in range(300_000))
    return max(1.0, (time.thread_time() - before) / LOOP_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that is dear and not marked so: `make test` is to stay a matter of minutes."""
    before, num_modules = _processor_s(), len(sys.modules)
    yield
    used = _processor_s() - before
    if len(sys.modules) - num_modules > NUM_IMPORTS:
        return  # the first test of a process that needs transformers pays for all that do
    if used <= LIMIT_S * NOISE or any(item.get_closest_marker(mark) for mark in DEAR):
        return
    if (used := used / _slowness() / NOISE) > LIMIT_S:
        pytest.fail(f"took {used:.1f} s of processor time; the limit is {LIMIT_S:g}: make it smaller, or mark it slow")


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Undo what a test does to the project's variables by other means than `monkeypatch`, which is set up after this.

    Code that names a folder for the kernels of a device writes them: a later test of the process would build its
    kernels anew, and load the same ops twice.
    """
    before = _named_variables()
    yield
    for name in _named_variables().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


_TELLING = ("cli", "host", "house", "scaffold", "tools")
"""Folders of tests about the metadata of what is installed, beside those with a vendor of their own."""


@functools.cache
def _plugins_of(path: tuple[str, ...], num_finders: int) -> PluginMetadata:
    return plugin_metadata.read_plugins()


@pytest.fixture(autouse=True)
def _installed_is_read_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device that is opened has the metadata of all distributions read, twice: for most tests once is enough."""
    about = request.path.relative_to(request.config.rootpath).parts
    if "install_vendor" not in request.fixturenames and not set(_TELLING).intersection(about):
        read = lambda: _plugins_of(tuple(sys.path), len(sys.meta_path))  # noqa: E731
        monkeypatch.setattr(discovery, "read_plugins", read)


def _little_to_measure() -> None:
    """Have Dynamo neither write its trace log nor time its guards behind emptied caches: half of a short trace.

    pytest hands its handlers to every logger that does not propagate, and torch writes for whoever has handlers there.
    """
    if "torch" in sys.modules and "TORCH_TRACE" not in os.environ:
        log = logging.getLogger("torch.__trace")
        log.handlers.clear()
        log.propagate = True
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.__dict__["profile_guard_manager"] = lambda *_: 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow what `cases(n)` leaves out, before `-m` and `-k` choose: which cases those are depends on neither.

    Cases with a mark of their own are left out of it: `make test` does not run them, or skips them.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") and not any(item.get_closest_marker(mark) for mark in DEAR):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        (count,) = next(group[0].iter_markers("cases")).args
        quick = {number * (len(group) - 1) // max(count - 1, 1) for number in range(count)}
        for number, item in enumerate(group):
            if number not in quick:
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Have no collector run meanwhile: half of the time goes to it, as all syntax trees and modules stay alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run all rules of the house, which share what is read of the tree; else a file is the unit."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/house" if nodeid.startswith("tests/house/") else super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Spare it for the whole run, where the tests have imported torch."""
    _little_to_measure()


def pytest_runtest_logstart() -> None:
    """Spare it, where a test has imported torch."""
    _little_to_measure()


def pytest_configure() -> None:
    """Let tables be as wide in every process of a run: readline, which pytest imports, sets COLUMNS for workers."""
    os.environ.pop("COLUMNS", None)


def _named_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("CORE_", "ACME_"))}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail the test that leaves gradients off: later tests of its process would, far from the cause."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail(f"{item.name} leaves gradients off")
