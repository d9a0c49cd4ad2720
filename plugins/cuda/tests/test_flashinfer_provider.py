"""core_cuda/flashinfer: whether it is there, what is built ahead, and that nothing of it runs unasked."""

from __future__ import annotations

import os
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from core.common.kernel_compilers import KernelForms
from core.errors import UsageError

pytest.importorskip("triton", reason="needs triton")
from fake_flashinfer import install, plant

from core_cuda import implementations as own
from core_cuda.flashinfer import building, folder, presence
from core_cuda.flashinfer.implementations import implementations
from core_cuda.ops import launching

BF16 = torch.bfloat16
FORMS = KernelForms(dtypes=(BF16, torch.float32), head_sizes=(128,))
NAMES = ["norm", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gemm", "fp8_blockscale_gemm_90"]
ATTENTION = [building.attention_module(b, BF16, 128, window=False, softcap=False) for b in ("fa2", "fa3")]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "capability", lambda: (9, 0))


def test_without_the_library_each_implementation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert {each.missing for each in implementations()} == {
        "flashinfer-python is not installed (pip install 'core[cuda]')"
    }
    assert building.compiler().package == ""
    with pytest.raises(UsageError, match="is not installed"):
        list(building.build(FORMS))


@pytest.mark.parametrize("version", ["0.6.11", "0.7.0", "1.0"])
def test_other_versions_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    assert version in presence.why_not()


@pytest.mark.parametrize("version", ["0.6.12", "0.6.18.post1"])
def test_known_versions_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    assert presence.why_not() == "" and building.compiler().package == "flashinfer-python"
    missing = {each.name: each.missing for each in implementations() if each.missing}
    assert list(missing) == ["flashinfer_quantized_linear_blocks"]  # it would run unasked, and be compiled first
    assert "not built ahead" in missing["flashinfer_quantized_linear_blocks"]


def test_asking_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.6.12")
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # an import would raise
    implementations()
    building.compiler()
    building.not_ahead("norm")


def test_the_plugins_own_kernels_come_first() -> None:
    names = Counter(each.name for each in (*own.IMPLEMENTATIONS, *implementations()))
    assert set(names.values()) == {1}
    assert {each.op for each in implementations()} <= {each.op for each in own.IMPLEMENTATIONS}
    assert [each.name for each in implementations() if each.slack > 1] == ["flashinfer_quantized_linear_fast"]


def test_kernels_are_built_once_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = plant(monkeypatch, tmp_path)
    assert all("not built ahead" in str(building.not_ahead(name)) for name in NAMES)
    assert list(building.build(FORMS)) == NAMES + ATTENTION == library.built
    assert list(building.build(FORMS)) == NAMES + ATTENTION == library.built  # nothing is compiled again
    assert all(building.not_ahead(name) is None for name in NAMES + ATTENTION)
    assert {each.missing for each in implementations()} == {""}
    kept = folder.ahead("0.6.12")
    assert kept is not None and kept.is_relative_to(tmp_path / "kept") and kept.name.startswith("0.6.12-sm90-cuda")
    assert {path.name for path in kept.rglob("*") if path.is_file()} == {f"{name}.so" for name in NAMES + ATTENTION}
    assert not list((tmp_path / "jit").rglob("*.o"))


def test_windows_and_soft_caps_are_built_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, tmp_path)
    forms = KernelForms(dtypes=(torch.float16,), head_sizes=(64, 256), window=True, softcap=True)
    found = [name for name in building.build(forms) if name not in NAMES]
    wanted = [
        building.attention_module(b, torch.float16, size, window=w, softcap=s)
        for size in (64, 256)
        for w in (False, True)
        for s in (False, True)
        for b in ("fa2", "fa3")[: 1 if w else 2]
    ]
    assert found == wanted


def test_other_gpus_build_nothing_of_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path)
    monkeypatch.setattr(launching, "capability", lambda: (8, 9))
    assert list(building.build(FORMS)) == [name for name in NAMES + ATTENTION if "90" not in name]


def test_a_module_that_cannot_be_compiled_does_not_keep_the_others_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = plant(monkeypatch, tmp_path)
    real = library.module.jit.core.build_jit_specs

    def build(specs: list[Any], **options: Any) -> None:
        if any(spec.name == "gemm" for spec in specs):
            raise RuntimeError("Ninja build failed.\nld: error: no -lcublasLt here")
        real(specs, **options)

    monkeypatch.setattr(library.module.jit.core, "build_jit_specs", build)
    found: list[str] = []
    with pytest.raises(UsageError, match=r"building gemm of FlashInfer\n  found: ld: error: no -lcublasLt"):
        found.extend(building.build(FORMS))
    assert found == [name for name in NAMES + ATTENTION if name != "gemm"]
    assert all((building.not_ahead(name) is None) == (name != "gemm") for name in NAMES + ATTENTION)


def test_what_was_built_is_loaded_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = plant(monkeypatch, tmp_path)
    list(building.build(FORMS))
    presence.load.cache_clear()
    assert presence.load() is library.module
    assert folder.ahead("0.6.12") == library.module.jit.env.FLASHINFER_AOT_DIR


def test_what_it_compiles_itself_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = plant(monkeypatch, tmp_path)
    with folder.KEPT.counting() as count:
        assert count() == 0
        made = Path(library.module.jit.env.FLASHINFER_JIT_DIR) / "norm"
        made.mkdir(parents=True)
        (made / "norm.so").touch()
        assert count() == 1


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
def test_a_folder_of_others_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path)
    list(building.build(FORMS))
    (tmp_path / "kept").chmod(stat.S_IRWXU | stat.S_IWOTH | stat.S_IXOTH)
    assert folder.base() is None and "not built ahead" in str(building.not_ahead("norm"))
    with pytest.raises(UsageError, match="only this user may write"):
        list(building.build(FORMS))
