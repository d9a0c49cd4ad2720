"""core_cuda/compiler.py: Triton's kernels are counted by its listener, which others may have set before."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from core_cuda.compiler import TRITON, begin_key


def triton_with(listener: Any) -> Any:
    return SimpleNamespace(knobs=SimpleNamespace(compilation=SimpleNamespace(listener=listener)))


def test_compiled_kernels_count_and_those_found_on_disk_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []

    def others(**event: Any) -> None:
        heard.append(event)

    triton = triton_with(others)
    monkeypatch.setitem(sys.modules, "triton", triton)
    with TRITON.counting() as count:
        for hit in (False, True, False):
            triton.knobs.compilation.listener(src="kernel", cache_hit=hit)
        assert count() == 2
    assert len(heard) == 3 and triton.knobs.compilation.listener is others


def test_without_triton_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with TRITON.counting() as count:
        assert count() == 0
    assert "triton" not in sys.modules


def test_an_error_gives_the_listener_back(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = triton_with(None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    with pytest.raises(ValueError, match="broken"), TRITON.counting():
        raise ValueError("broken")
    assert triton.knobs.compilation.listener is None


def test_the_plugin_says_where_triton_keeps_kernels_and_whose_version_counts() -> None:
    assert (TRITON.name, TRITON.folder_variable, TRITON.package) == ("triton", "TRITON_CACHE_DIR", "triton")


def test_the_key_is_computed_apart_and_its_error_is_left_to_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    asked: list[threading.Thread] = []

    def broken() -> str:
        asked.append(threading.current_thread())
        raise OSError("no library")

    monkeypatch.setattr(cache, "triton_key", broken)
    thread = begin_key()
    thread.join()
    assert asked == [thread] and thread.daemon
