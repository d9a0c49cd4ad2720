"""core/verify/fakes/checks.py: every kind of lie in a planted library is found, and a kernel's crash or hang ends
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import core.common.ops.canonical  # noqa: F401  # registers the namespace that a test names
from core.common.fakes import FakeOp, FakeResult, like
from core.common.ops.declaration import Sample
from core.errors import CoreError, DeviceUnavailableError, UsageError
from core.host.selection import select_device
from core.verify.fakes import worker as _fake_worker
from core.verify.fakes.checks import LibraryCheck, OpCheck, check_library
from core.verify.fakes.worker import _Library, _load
from tests.support import break_torch, cpu, refused

ABSENT_DEVICE = """
from core.errors import DeviceUnavailableError

@hookimpl
def core_open_device(context):
    raise DeviceUnavailableError("device 'acme'", found="no card", remedy="plug one in")
"""
WITH_OPS = """
@hookimpl
def core_open_device(context):
    @torch.library.custom_op("acme_opened::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    same.register_fake(torch.empty_like)
    return parts()
"""
LYING = str(Path(__file__).parents[2] / "data/lying_ops.py")
FIRST_CALLS = {
    "wrong_strides": ["result 0 has strides (1, 5), and the fake says (8, 1)"],
    "writes": ["writes its argument 'x', which the schema does not declare"],
}


@pytest.fixture(scope="module")
def checked() -> LibraryCheck:
    return check_library(LYING, "cpu", timeout_s=6.0)


@pytest.fixture(scope="module")
def ops(checked: LibraryCheck) -> dict[str, OpCheck]:
    assert all(each.schema.startswith(f"{each.op}(") and not each.declared for each in checked.ops)
    return {each.op.removeprefix("lying_ops::"): each for each in checked.ops}


@pytest.mark.slow
def test_the_library_and_the_device_are_named(checked: LibraryCheck) -> None:
    assert checked.library == LYING and checked.device.startswith("cpu (")
    assert [each.op for each in checked.ops] == sorted(each.op for each in checked.ops) and len(checked.ops) == 19


@pytest.mark.slow
@pytest.mark.parametrize("name", ["true_copy", "true_linear", "true_scale", "true_rows"])
def test_true_fakes_agree(ops: dict[str, OpCheck], name: str) -> None:
    assert (ops[name].verdict, ops[name].lies, ops[name].reason) == ("agrees", (), "")
    assert ops[name].calls >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("wrong_shape", "result 0 has shape (5, 8), and the fake says (5, 8, 2)"),
        ("wrong_dtype", "result 0 has dtype float32, and the fake says "),
        ("wrong_strides", "result 0 has strides (1, 5), and the fake says (8, 1)"),
        ("wrong_count", "the kernel gives 2 results, the fake 1"),
        ("writes", "writes its argument 'x', which the schema does not declare"),
        ("returns_input", "result 0 shares memory with argument 'x'"),
        ("returns_view", "result 0 shares memory with argument 'x'"),
        ("fake_returns_input", "the fake's result 0 shares memory with argument 'x', and the kernel's does not"),
        ("fake_forgets_alias", "result 0 shares memory with argument 'x', and the fake's does not"),
        ("fake_raises", "runs on real tensors and raises on fake ones: "),
    ],
)
def test_each_kind_of_lie_is_told_once_with_its_call(ops: dict[str, OpCheck], name: str, first: str) -> None:
    check = ops[name]
    assert check.verdict == "lies" and check.lies[0].what.startswith(first)
    assert check.lies[0].call.startswith("x=") and check.calls >= 10
    assert len(check.lies) <= 2, "the same lie about other sizes is one lie"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("no_fake", "no fake", "it can't run on fake tensors: no fake kernel, and no plugin declares one"),
        ("picky", "not called", "ValueError: x must have seven dimensions (and 249 more calls that it refuses)"),
        ("no_guess", "not called", "no value can be guessed for argument 'how' of type str"),
        ("z_crashes", "not called", "x=float32 (5, 8): the process crashed with SIGSEGV; no further call was made"),
        ("z_hangs", "not called", "the process gave no answer within 6 s and was killed; no further call was made"),
    ],
)
def test_what_could_not_be_compared_is_said(ops: dict[str, OpCheck], name: str, verdict: str, reason: str) -> None:
    assert ops[name].verdict == verdict and not ops[name].lies
    assert ops[name].reason.endswith(reason)


@pytest.mark.slow
def test_declared_samples_come_first_and_the_fakes_of_the_device_are_tested() -> None:
    """The pack of the cpu plugin, on a library like the real one: what is left is what its schemas keep quiet about."""
    checked = check_library("tests.sgl_kernel.installed", "cpu", timeout_s=60.0)
    verdicts = {each.op.removeprefix("sgl_kernel::"): each for each in checked.ops}
    assert len(verdicts) == 55 and all(each.declared for each in verdicts.values())
    untrue = {name for name, each in verdicts.items() if each.verdict != "agrees"}
    assert untrue == {
        "apply_rotary_pos_emb_cpu",
        "chunk_gated_delta_rule_cpu",
        "decode_attention_cpu",
        "fused_add_layernorm_cpu",
    }
    assert {verdicts[name].verdict for name in untrue} == {"lies"}
    assert verdicts["rotary_embedding_cpu"].calls == 3


@pytest.mark.filterwarnings("ignore:Tensor.mT is deprecated")
def test_a_lie_is_told_of_the_first_call() -> None:
    """The same in this process, of a few ops."""
    opened = _Library(cpu(), _load(LYING))
    told = {name: _fake_worker._call(opened, f"lying_ops::{name}", 0, run=True) for name in ("true_copy", *FIRST_CALLS)}
    assert {name: each["differences"] for name, each in told.items()} == {"true_copy": [], **FIRST_CALLS}


def test_an_op_of_another_device_is_not_called() -> None:
    def samples(device: torch.device) -> Iterator[Sample]:
        raise NotImplementedError("another chip's op")
        yield

    fake = FakeOp(op="aten::neg", rule=like("self"), samples=samples)
    opened = _Library(cpu(fakes=((fake, FakeResult(applied=False, reason="")),)), ["aten::neg"])
    assert _fake_worker._call(opened, "aten::neg", 0, run=True) == {"state": "impossible", "why": "another chip's op"}


@pytest.mark.slow
def test_a_library_that_can_not_be_loaded_is_one_clear_error() -> None:
    with refused(UsageError, "op library 'no_such_module'", "it can't be loaded: ModuleNotFoundError"):
        check_library("no_such_module", "cpu", timeout_s=5.0)


def test_a_module_without_ops_is_one_clear_error() -> None:
    with refused(UsageError, "op library 'json'", "loading it registers no op with torch"):
        _load("json")


def test_a_shared_library_is_loaded_as_one() -> None:
    with pytest.raises(OSError, match=r"no/such/file\.so"):
        _load("no/such/file.so")


def test_a_namespace_that_is_registered_already_can_be_named(tmp_path: Path) -> None:
    assert "core::rms_norm" in _load("core")
    path = tmp_path / "some_ops.py"
    path.write_text(
        "import torch\nL = torch.library.Library('fake_checks_test', 'DEF')\nL.define('op(Tensor x) -> Tensor')\n"
    )
    assert _load(str(path)) == ["fake_checks_test::op"] == _load("fake_checks_test")


@pytest.mark.slow
def test_a_library_that_ends_the_process_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "broken_ops.py"
    path.write_text("import os\nos._exit(3)\n")
    with refused(UsageError, "broken_ops.py", "loading it ended with exit code 3"):
        check_library(str(path), "cpu", timeout_s=5.0)


WRITING = """
import os
from pathlib import Path

import torch


@torch.library.custom_op("untidy_ops::save", mutates_args=())
def save(x: torch.Tensor) -> torch.Tensor:
    Path("dump.pt").write_text("x")
    Path(os.environ["UNTIDY_FOLDER"]).write_text(os.getcwd())
    return x.clone()


@save.register_fake
def fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
"""


@pytest.mark.slow
def test_what_kernels_write_beside_themselves_is_left_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, here = tmp_path / "where", tmp_path / "here"
    here.mkdir()
    (here / "untidy_ops.py").write_text(WRITING)
    monkeypatch.chdir(here)
    monkeypatch.setenv("UNTIDY_FOLDER", str(where))
    (found,) = check_library("./untidy_ops.py", "cpu", timeout_s=60.0).ops
    assert (found.verdict, found.reason) == ("agrees", "")
    assert [path.name for path in here.iterdir() if path.name != "__pycache__"] == ["untidy_ops.py"]
    folder = Path(where.read_text())
    assert folder != here and not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["acme", "nosuch"])
def test_a_library_that_comes_with_a_device_gives_that_devices_own_error(
    device: str, install_vendor: Callable[..., Any]
) -> None:
    install_vendor(plugin=ABSENT_DEVICE)
    with pytest.raises(CoreError) as expected:
        select_device(device)
    with pytest.raises(DeviceUnavailableError) as caught:
        check_library("acme_kernels", device, timeout_s=60.0)
    assert type(caught.value) is type(expected.value) and str(caught.value) == str(expected.value)


@pytest.mark.slow
def test_a_namespace_that_opening_the_device_registers_is_found(install_vendor: Callable[..., Any]) -> None:
    install_vendor(plugin=WITH_OPS)
    (found,) = check_library("acme_opened", "acme", timeout_s=60.0).ops
    assert (found.op, found.verdict, found.lies) == ("acme_opened::same", "agrees", ())


@pytest.mark.slow
def test_a_backend_that_breaks_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_torch(tmp_path, monkeypatch)
    with pytest.raises(DeviceUnavailableError, match="torch_dev is installed and fails: libdev"):
        check_library("acme_kernels", "cpu", timeout_s=60.0)
