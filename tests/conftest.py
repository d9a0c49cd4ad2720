"""Fixtures shared by all tests: fake vendor distributions, made of metadata and modules in a temporary folder."""

from __future__ import annotations

import gc
import itertools
import logging
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_NUMBERS = itertools.count()

PLUGIN_HEAD = """
import torch
from core.device import Capabilities, DeviceParts, MemoryInfo
from core.errors import DeviceUnavailableError
from core.hookspecs import hookimpl

def parts():
    return DeviceParts(
        torch_device=torch.device("cpu"),
        capabilities=Capabilities(device_name="Acme One", dtypes=frozenset({torch.float32})),
        memory=lambda: MemoryInfo(used_bytes=0, total_bytes=1, peak_bytes=0),
    )
"""
OPENS = """
@hookimpl
def core_open_device(context):
    return parts()
"""
PROBE_HEAD = "from core.probe import Probe\n"
TWO_DEVICES = "def probe():\n    return Probe(available=True, device_count=2, reason='two Acme Ones')\n"


@dataclass(frozen=True)
class Vendor:
    """A fake distribution on sys.path. module: its import package, unique to the test."""

    module: str
    distribution: str
    root: Path


InstallVendor = Callable[..., Vendor]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CORE_PLUGINS", "CORE_PLUGINS_DISABLE", "CORE_PROBE_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CORE_CACHE", "0")  # tests of the compile cache switch it on, in a folder of their own


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Undo what a server started in this process does to the log of all: later tests would see records of libraries."""
    root = logging.getLogger()
    level, before = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    # pytest's own handlers, which are of classes of their own, come and go between the parts of a test.
    for handler in [each for each in root.handlers if type(each) is logging.StreamHandler and each not in before]:
        root.removeHandler(handler)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a compile cache that is on for the test."""
    monkeypatch.setenv("CORE_CACHE", "1")
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the process count as one that has frozen nothing, though what it holds is kept from all collections.

    Real thawing would have every collection from here on walk all of torch.
    """
    from core.common import collector

    gc.freeze()
    monkeypatch.setattr(collector, "_FEWEST_FROZEN", gc.get_freeze_count() + 1000)
    new: list[list[object]] = [[] for _ in range(2000)]
    yield
    new.clear()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def _made_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the entry of `tests.compilation.cache.cached_model.Model` as it is; read only."""
    from tests.compilation.cache.cached_model import start

    made = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORE_CACHE", "1")
        patch.setenv("CORE_CACHE_DIR", str(made))
        start()
    return made


@pytest.fixture
def made_cache(_made_cache: Path, cache_folder: Path) -> Path:
    """Return the test's cache folder with that entry in it."""
    shutil.copytree(_made_cache, cache_folder)
    return cache_folder


@pytest.fixture
def install_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallVendor:
    """Return a function that puts a fake vendor's distribution on sys.path, of this process and its workers.

    plugin: source, put after `head`. probe: source after PROBE_HEAD, None for no probe. requires: Requires-Dist lines.
    """

    def install(
        *,
        device: str = "acme",
        distribution: str = "acme-device",
        version: str = "1.0",
        plugin: str = OPENS,
        head: str = PLUGIN_HEAD,
        probe: str | None = TWO_DEVICES,
        requires: tuple[str, ...] = ("core>=0.1",),
        attribute: str = "",
    ) -> Vendor:
        number = next(_NUMBERS)
        module = f"fake_vendor_{number}"
        root = tmp_path / str(number)
        package = root / module
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "plugin.py").write_text(head + textwrap.dedent(plugin))
        entry_points = f"[core.plugins]\n{device} = {module}.plugin{attribute}\n"
        if probe is not None:
            (package / "probe.py").write_text(PROBE_HEAD + textwrap.dedent(probe))
            entry_points += f"[core.probes]\n{device} = {module}.probe:probe\n"
        metadata = [f"Name: {distribution}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *metadata, ""]))
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(str(root))
        return Vendor(module, distribution, root)

    return install
