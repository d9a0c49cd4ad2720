"""Engine configurations that can't work are refused when they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.compilation.options import CompileOptions
from core.device import Capabilities
from core.engine.steps.runner import EngineConfig, powers
from core.errors import UsageError
from tests.support import refused


def device(*modes: Any) -> Capabilities:
    return Capabilities(device_name="any", dtypes=frozenset(), modes=modes)


GPU = device("full", "piecewise", "segmented")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"block_size": 0},
        {"block_size": 2.5},
        {"max_model_len": 0},
        {"max_model_len": 1},
        {"max_model_len": -5},
        {"decode_buckets": ()},
        {"decode_buckets": (0, 8)},
        {"decode_buckets": ["8"]},
        {"decode_buckets": (4,), "max_num_seqs": 5},
        {"prefill_buckets": ()},
        {"prefill_buckets": ("32",)},
        {"prefill_buckets": (2,), "max_num_seqs": 3},
        {"sampling": ()},
        {"sampling": "greedy"},
        {"sampling": ("greedy", "beam")},
        {"sampling": ("greedy", "greedy")},
        {"speculative": -1},
        {"max_step_tokens": 4},
        {"max_step_tokens": 64, "prefill_buckets": (32,)},
        {"mixed_step_tokens": 0},
        {"kv_cache_dtype": "fp16"},
        {"speculative": True},
        {"options": 3},
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**fields)
    name = next(iter(fields))
    assert caught.value.asked.startswith(f"{name}=")
    assert name in caught.value.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_seqs": 1, "block_size": 1, "max_model_len": 2},
        {"max_num_seqs": 3, "decode_buckets": (1, 4), "prefill_buckets": (1, 3)},
        {"sampling": ("random",), "speculative": 4},
        {"kv_cache_dtype": "fp8"},
        {"max_step_tokens": 32, "prefill_buckets": (16, 32), "mixed_step_tokens": 1},
        {"options": CompileOptions(mode="off")},
        {"options": CompileOptions(mode={"prefill": "off"}, break_at=("torch.tanh",), cache=False)},
        {"options": CompileOptions(mode={"verify": ("full", "off")})},
        {"options": CompileOptions(mode={})},
    ],
)
def test_a_right_one_is_taken(fields: dict[str, Any]) -> None:
    assert EngineConfig(**fields) == EngineConfig(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", {"decode": "off", "encode": "off"}),
        ("guards", {"want": (1, 2)}),
        ("progress", print),
        ("examples", []),
    ],
)
def test_what_the_engine_states_itself_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(options=CompileOptions(**{name: value}))
    assert caught.value.asked.startswith(f"options.{name}=")
    assert f"another options.{name}" in caught.value.remedy


@pytest.mark.parametrize("modes", [(), ("compile",)])
def test_prefill_buckets_end_where_the_budget_of_a_step_does(modes: tuple[Any, ...]) -> None:
    for budget in (96, 4096):
        assert EngineConfig(max_step_tokens=budget).prefill_sizes(device(*modes), 512)[-1] == budget
    assert EngineConfig(max_step_tokens=96, prefill_buckets=(128,)).prefill_sizes(device(*modes), 512) == (128,)


def test_powers_end_with_the_last() -> None:
    assert powers(1, 6, 2) == (1, 2, 4, 6)
    assert powers(32, 2, 4) == (2,)


def test_phases_take_the_devices_first_mode_and_prefill_piecewise_where_lengths_are_read_on_the_host() -> None:
    config = EngineConfig()
    assert [config.modes_of(phase, GPU)[0] for phase in ("decode", "prefill", "verify")] == [
        "full",
        "piecewise",
        "full",
    ]
    assert config.modes_of("prefill", device("compile")) == ("compile", "off")
    assert config.modes_of("prefill", device()) == ("off",)
    assert config.modes_of("prefill", replace(GPU, device_lengths=True)) == (*GPU.modes, "off")
    assert config.modes_of("prefill", device("full", "piecewise", "segmented"))[1:] == ("full", "segmented", "off")
    assert EngineConfig(options=CompileOptions(mode="off")).modes_of("prefill", GPU) == ("off",)
    two = EngineConfig(options=CompileOptions(mode=("full", "off")))
    assert two.modes_of("prefill", GPU) == ("full", "off")
    one = EngineConfig(options=CompileOptions(mode={"decode": "off"}))
    assert one.modes_of("decode", GPU) == ("off",) and one.modes_of("prefill", GPU)[0] == "piecewise"


def test_of_the_modes_asked_for_those_that_the_device_has_are_taken() -> None:
    """A runner tries the first alone, and buckets are chosen by it: it must not be one that the device lacks."""
    config = EngineConfig(max_num_seqs=64, options=CompileOptions(mode=("segmented", "compile", "off")))
    assert config.modes_of("decode", device("compile")) == ("compile", "off")
    assert config.decode_sizes(device("compile")) == (1, 2, 4, 8, 16, 32, 64)
    assert config.compile_options(("decode",), device("full")).mode == {"decode": "off"}


@pytest.mark.parametrize("mode", [(), {"decode": ()}, ("segmented",), "segmented"])
def test_modes_of_which_the_device_has_none_are_refused(mode: Any) -> None:
    config = EngineConfig(options=CompileOptions(mode=mode))
    with refused(UsageError, "for phase 'decode'", "this device has: compile, off"):
        config.decode_sizes(device("compile"))


def test_the_options_of_a_compile_name_the_phases_that_there_are() -> None:
    config = EngineConfig(
        sampling=("greedy",), options=CompileOptions(strict=True, mode={"decode": "full"}, passes=("lift_rotary",))
    )
    options = config.compile_options(("decode", "prefill"), GPU, outputs=[("rows",)])
    assert isinstance(options.mode, dict)
    assert options.mode["decode"] == "full", "a mode that is named is an order"
    assert options.mode["prefill"][0] == "piecewise" and options.mode["prefill"][-1] == "off"
    assert options.guards == {"decode": {"sampling": ("greedy",)}} and options.outputs == [("rows",)]
    assert (options.strict, options.passes, options.verify) == (True, ("lift_rotary",), "off")


@pytest.mark.parametrize(("asked", "kept"), [(None, True), (True, True), (False, False)])
def test_an_engine_keeps_its_graphs_unless_told_otherwise(asked: bool | None, kept: bool) -> None:
    options = EngineConfig(options=CompileOptions(cache=asked)).compile_options(("decode",), GPU)
    assert options.cache is kept


@pytest.mark.parametrize(
    ("seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (256, (1, 2, 4, *range(8, 257, 8))),
        (512, (1, 2, 4, 8, 16, *range(32, 513, 32))),
    ],
)
def test_decode_is_captured_at_many_sizes_where_a_capture_is_cheap(seqs: int, sizes: tuple[int, ...]) -> None:
    found = EngineConfig(max_num_seqs=seqs).decode_sizes(GPU)
    assert found == sizes
    assert len(found) <= 35


def test_decode_is_captured_at_few_sizes_where_each_is_a_compile() -> None:
    assert EngineConfig(max_num_seqs=20).decode_sizes(device("compile")) == (1, 2, 4, 8, 16, 20)
    assert EngineConfig(max_num_seqs=64).decode_sizes(device("compile")) == (1, 2, 4, 8, 16, 32, 64)
    assert EngineConfig(max_num_seqs=64, decode_buckets=(64,)).decode_sizes(GPU) == (64,)
