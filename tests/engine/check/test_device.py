"""core/engine/check/device.py: a device whose own kernels are wrong is said to be, and no other device is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.cli import main
from core.compilation.options import CompileOptions
from core.engine.check.comparison import Comparison, compare
from core.engine.models import loading
from core.engine.models.assets import embedded_model
from core.engine.models.loading import LoadedModel, load_model
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError
from core.host.selection import select_device

CPU = torch.device("cpu")
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
SIZES = EngineConfig(
    max_num_seqs=1,
    max_model_len=64,
    decode_buckets=(1,),
    prefill_buckets=(32,),
    sampling=("greedy",),
    options=CompileOptions(mode="off"),
)

Fault = Callable[[Tensor], Tensor]


def no_content(out: Tensor) -> Tensor:
    return torch.zeros_like(out)


def left_over(out: Tensor) -> Tensor:
    return torch.linspace(-40, 40, out.numel(), dtype=out.dtype).view(out.shape)


def no_number(out: Tensor) -> Tensor:
    return torch.full_like(out, float("nan"))


def honest(out: Tensor) -> Tensor:
    """Round otherwise than the processor does: each number by up to one unit of its dtype."""
    noise = torch.rand(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2 - 1
    return (out.double() * (1 + torch.finfo(out.dtype).eps * noise)).to(out.dtype)


@contextmanager
def on_device(loaded: LoadedModel, kernel: Fault) -> Iterator[None]:
    """Let the attention kernels of the memory that holds this model change what they return; copies lie elsewhere."""
    own, plain, inside = loaded.model, nn.functional.scaled_dot_product_attention, [False]

    def attention(*args: Any, **options: Any) -> Tensor:
        out = plain(*args, **options)
        return kernel(out) if inside[0] else out

    def enter(module: nn.Module, _: Any) -> None:
        inside[0] = module is own

    def leave(module: nn.Module, *_: Any) -> None:
        inside[0] = False

    handles = [own.register_forward_pre_hook(enter), own.register_forward_hook(leave, always_call=True)]
    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = plain
        for handle in handles:
            handle.remove()


def run(kernel: Fault, dtype: torch.dtype = torch.float32) -> Comparison:
    loaded = load_model(embedded_model(), torch_device=CPU, dtype=dtype)
    with on_device(loaded, kernel), Engine(loaded, select_device("cpu"), SIZES) as engine:
        return compare(engine, [PROMPT], num_tokens=8, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_without_content_is_the_fault_of_the_device(dtype: torch.dtype) -> None:
    found = run(no_content, dtype)
    name = str(dtype).removeprefix("torch.")
    assert found.device_fault is not None and found.device_fault.startswith("cpu computes wrongly: eager on it differs")
    assert f"on the processor in {name}" in found.device_fault
    assert not found.passed and found.verdict is None and "yardstick" in found.skipped


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_that_rounds_otherwise_is_not_blamed(dtype: torch.dtype) -> None:
    found = run(honest, dtype)
    assert found.device_fault == "" and found.verdict is not None and found.verdict.passed and found.passed


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_core_run_says_it_first_and_fails(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(embedded_model(), torch_device=CPU)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: loaded)
    options = ["--device", "cpu", "--mode", "off", "--max-new-tokens", "4"]
    with on_device(loaded, no_content):
        assert main(["run", *options, *(["--json"] if as_json else [])]) == 1
    out = capsys.readouterr().out
    if as_json:
        document = json.loads(out)
        assert list(document)[:3] == ["schema", "core", "device_fault"]
        assert document["device_fault"].startswith("cpu computes wrongly") and not document["check"]["passed"]
    else:
        rows = out.split("\n\n", 1)[1].splitlines()  # after the text
        assert rows[0].startswith("DEVICE FAULT") and "cpu computes wrongly" in rows[0]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [left_over, no_number])
def test_where_no_engine_takes_the_model_the_device_is_blamed_and_not_the_model(
    kernel: Fault, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(embedded_model(), torch_device=CPU)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: loaded)
    with on_device(loaded, kernel):
        assert main(["run", "--device", "cpu", "--mode", "off", "--max-new-tokens", "4", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "DeviceUnavailableError"
    assert error["found"].startswith("cpu computes wrongly") and "see to its driver and plugin" in error["remedy"]


@pytest.mark.slow
def test_a_model_that_no_engine_takes_is_still_refused_on_an_honest_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(embedded_model(), torch_device=CPU)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: loaded)

    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError("running it", found="state of its own", remedy="take another")

    monkeypatch.setattr("core.engine.serve.engine.make_runner", refuse)
    with on_device(loaded, honest):
        assert main(["run", "--device", "cpu", "--mode", "off", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["found"] == "state of its own"
