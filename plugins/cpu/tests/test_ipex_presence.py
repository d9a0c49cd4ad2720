"""core_cpu/ipex/presence.py: another torch's intel-extension-for-pytorch is refused by name, and imported by nobody."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata

import pytest
import torch

import core
from core.common.lowering import LoweringRequest
from core.common.ops.implementation import OpCall
from core.errors import LoweringError
from core_cpu import plugin
from core_cpu.ipex import presence


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    presence.why_not.cache_clear()
    yield
    presence.why_not.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if name != "intel-extension-for-pytorch":
            return metadata.distribution(name).version
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)


def test_one_for_another_torch_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.9.0+cpu")
    assert presence.why_not() == (
        f"intel-extension-for-pytorch 1.9.0 works with torch 1.9 alone, and this is torch {torch.__version__}"
    )
    assert "intel_extension_for_pytorch" not in sys.modules


def test_one_that_is_not_installed_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert presence.why_not() == (
        "intel-extension-for-pytorch is not installed: "
        "it needs an environment with torch 2.8 (pip install 'core[ipex]')"
    )


def test_one_for_this_torch_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ".".join(torch.__version__.split(".")[:2]) + ".7+cpu")
    assert presence.why_not() == ""


def test_the_lowering_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.9.0")
    device = core.select_device("cpu")
    _, lowering = plugin.core_lowering(device).resolve("ipex")  # type: ignore[arg-type]
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(LoweringError, match=r"lowering by 'ipex'(.|\n)*works with torch 1\.9 alone"):
        lowering(LoweringRequest(graph=graph, example_inputs=(torch.zeros(2),)))


def test_its_implementation_is_named_and_says_why_it_does_not_run() -> None:
    (found,) = (each for each in plugin.core_register_ops() if each.name == "ipex_rms_norm")
    if presence.why_not():
        assert found.condition(OpCall(op="core::rms_norm")) == found.missing == presence.why_not()
