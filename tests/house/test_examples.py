"""examples/without_engine: each use of core without its engine runs, on a processor and on a device with graphs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from core.device import Device
from tests.recording import acme
from tests.support import cpu

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "without_engine"


def inline() -> Device:
    """Return the processor without a compiler: Inductor takes half a minute for some of the examples."""
    device = cpu()
    return replace(device, lowerings=replace(device.lowerings, default="inline"))


DEVICES = {"cpu": inline, "acme": acme, "cpu, compiled": cpu}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"without_engine_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks functions up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["cpu", "acme", pytest.param("cpu, compiled", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest) -> Device:
    made: Device = DEVICES[request.param]()
    return made


def test_generate_of_transformers_gives_its_own_tokens_through_a_graph(device: Device) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    result = example("generate").main(device, num_tokens=8)
    assert result["equal"], result
    assert len({token for row in result["tokens"] for token in row}) > 6
    report = result["report"]
    assert sum(report.replays.values()) == 7 and report.num_traces == 1 and report.fallbacks == {}


def test_a_hand_written_model_decodes_through_its_bound_cache(device: Device) -> None:
    result = example("hand_written").main(device)
    assert result["equal"], result
    assert len({token for row in result["tokens"] for token in row}) > 4
    report = result["report"]
    replayed: dict[str, int] = {}
    for key, count in report.replays.items():
        replayed[key.phase] = replayed.get(key.phase, 0) + count
    assert replayed == {"prefill": 3, "decode": 11} and report.fallbacks == {} and report.notes == ()
    assert {key.guards for key in report.replays if key.phase == "prefill"} == {
        (("want", "token"),),
        (("want", "logits"),),
    }


def test_a_foreign_graph_goes_through_the_passes(device: Device) -> None:
    result = example("foreign_graph").main(device)
    assert result["matched"]["lift_rms_norm"] == result["matched"]["lift_gated_activation"] == 1
    assert max(result["differences"]) < 1e-5 and result["fallbacks"] == {}


def test_a_plain_callable_is_captured_around_its_break(device: Device) -> None:
    result = example("plain_callable").main(device)
    assert result["equal"]
    if device.name == "acme":
        assert result["modes"] == {"main": "segmented"}
        lines = result["source"].split("\n")
        assert [line.split("(")[0].strip() for line in lines if line] == ["def replay", "graph_0", "land", "graph_1"]
