"""Slots of recurrent state: what is found in a model, what stands in for transformers' cache, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.inspect import recurrent as recurrent_inspection
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.masks import ALL
from core.engine.inspect.probe import largest_difference, own_logits, probe_sequences, rounding_bound
from core.engine.inspect.recurrence import NONE, StateKey
from core.engine.inspect.recurrent import inspect_recurrence
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.paged import recurrent
from core.engine.paged.blocks import FIRST_SLOT, BlockPool
from core.engine.paged.recurrent import RecurrentStates
from core.engine.paged.runner import PagedRunner
from core.engine.paged.self_check import chunks_of
from core.engine.paged.step_states import Run, SlotStates, StepCache, TokenStates
from core.engine.paged.tables import BlockTables
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import NULL_SLOT, Sequence
from core.engine.steps.step import Step
from core.host.selection import select_device
from tests.kernel_cases import OpsSeen
from tests.recording import acme

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_num_seqs=2, block_size=8, sampling=("greedy",), options=CompileOptions(mode="off"))


def tiny(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return build_model(tiny_config(model_type), torch_device=CPU, dtype=dtype).model


def sequence(index: int) -> Sequence:
    return Sequence(index, [1, 2, 3], SamplingParams(max_new_tokens=2))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("model_type", "kinds", "continues"),
    [
        ("lfm2", {"conv"}, True),
        ("mamba2", {"conv", "recurrent"}, True),
        # Its scan over several tokens begins without a state.
        ("mamba", {"conv", "recurrent"}, False),
    ],
)
def test_layers_are_found_by_what_they_do(model_type: str, kinds: set[str], continues: bool) -> None:
    model = tiny(model_type)
    found = inspect_recurrence(model)
    assert {state.key[0] for layer in found.layers.values() for state in layer.states} == kinds
    assert found.continues is continues
    for module, layer in found.layers.items():
        assert model.get_submodule(layer.path) is module
        assert not module._forward_hooks and not module._forward_pre_hooks
    kinds_of_layers = model.config.layer_types
    assert len(found.layers) == sum(kind != "full_attention" for kind in kinds_of_layers)


def test_states_in_a_cache_that_a_model_brings_are_found_by_its_methods() -> None:
    model = tiny("minimax")
    found = inspect_recurrence(model)
    (layer,) = found.layers.values()
    assert found.continues and layer.accessors == (("get_linear_cache", "set_linear_cache"),)
    config = model.config
    assert [state.key for state in layer.states] == [("recurrent", config.layer_types.index("linear_attention"), 0)]
    assert layer.states[0].shape == (config.num_attention_heads, config.head_dim, config.head_dim)
    assert all(not layer.accessors for layer in inspect_recurrence(tiny("mamba2")).layers.values())


def test_a_cache_that_a_model_brings_without_pairs_of_methods_has_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_inspection, "_accessors", lambda _kind: ())
    assert inspect_recurrence(tiny("minimax")) is NONE


@pytest.mark.cases(2)
@pytest.mark.parametrize(("model_type", "continues"), [("mamba", False), ("jamba", False), ("mamba2", True)])
def test_a_state_that_later_chunks_drop_is_found_however_little_it_changes(model_type: str, continues: bool) -> None:
    # In bfloat16 the logits without the state differ by less than rounding may.
    assert inspect_recurrence(tiny(model_type, torch.bfloat16)).continues is continues


def test_a_model_without_states_has_none() -> None:
    assert inspect_recurrence(tiny("llama")) is NONE
    assert NONE.bytes_per_sequence == 0


@pytest.mark.parametrize("lengths", [(5, 2, 1, 1), (2, 1, 7), (1, 1, 1, 4)])
def test_the_cache_of_a_step_does_what_that_of_transformers_does(lengths: tuple[int, ...]) -> None:
    from transformers.cache_utils import LinearAttentionLayer

    key: StateKey = ("conv", 0, 0)
    theirs, states = LinearAttentionLayer(), dict[StateKey, Tensor | None]()
    for index, length in enumerate(lengths):
        new, state = torch.randn(2, 3, length), torch.randn(2, 3, 5)
        ours = StepCache(states, {key: 4})
        assert (ours.get_conv_state(0) is None) is (index == 0)
        expected = theirs.update_conv_state(new, conv_kernel_size=4)
        assert torch.equal(ours.update_conv_state(new, 0, conv_kernel_size=4), expected)
        assert torch.equal(ours.update_recurrent_state(state, 0), theirs.update_recurrent_state(state))
        kept, recurrent_state = ours.get_conv_state(0), ours.get_recurrent_state(0)
        assert kept is not None and torch.equal(kept, theirs.conv_states[0])
        assert recurrent_state is not None and torch.equal(recurrent_state, theirs.recurrent_states[0])
        assert not ours.is_recording_past(0)


def test_a_sequence_has_a_slot_while_it_has_blocks() -> None:
    cache = BlockTables([BlockPool(20)], [ALL], block_size=4, share_prefixes=False, num_slots=2)
    first, second, third = (sequence(index) for index in range(3))
    assert cache.join(first) and cache.join(second)
    assert {first.slot, second.slot} == {FIRST_SLOT, FIRST_SLOT + 1}
    free = cache.pools[0].num_free
    assert not cache.join(third)  # no slot is left
    assert third.slot == NULL_SLOT and cache.pools[0].num_free == free
    cache.release(first)
    cache.release(first)
    assert first.slot == NULL_SLOT and cache.join(third)
    assert third.slot == FIRST_SLOT and not cache.join(first)


def test_a_sequence_without_room_for_blocks_takes_no_slot() -> None:
    cache = BlockTables([BlockPool(2)], [ALL], block_size=2, share_prefixes=False, num_slots=1)
    assert not cache.join(sequence(0))
    cache = BlockTables([BlockPool(9)], [ALL], block_size=2, share_prefixes=False, num_slots=1)
    assert cache.join(sequence(0))


@pytest.mark.slow
def test_a_closed_runner_leaves_the_model_as_it_was() -> None:
    model = tiny("mamba2")
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    runner = PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=32)
    try:
        assert torch.equal(model(input_ids=ids).logits, before)  # outside of steps a layer is its own
        assert all("forward" in module.__dict__ for module in inspect_recurrence(model).layers)
    finally:
        runner.close()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.slow  # eight layers of 512: the same bound, of a tiny model, is that of the next test
def test_a_model_that_rounds_otherwise_in_chunks_than_at_once_is_not_refused() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 8}
    sizes |= {"linear_num_key_heads": 4, "vocab_size": 4000}
    wide = tiny_config("qwen3_next", hidden_size=512, num_hidden_layers=8, layer_types=kinds * 2, **sizes)
    torch.manual_seed(0)
    model = build_model(wide, torch_device=CPU, dtype=torch.float32).model
    PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=128).close()


@pytest.mark.slow
def test_the_bound_knows_the_chunks_of_prompts() -> None:
    model = tiny("qwen3_next")
    probes = probe_sequences(model, max_model_len=128, max_num_seqs=2)
    with torch.no_grad():
        expected = own_logits(model, probes)
        whole, cut = (
            rounding_bound(model, probes, expected, chunks) for chunks in (None, lambda n: [n // 2, n - n // 2])
        )
    assert 0 < whole <= cut < 1e-3
    assert chunks_of(9, singly=False) == [4, 5] and chunks_of(5, singly=True) == [2, 1, 1, 1]
    assert chunks_of(1, singly=True) == chunks_of(1, singly=False) == [1]


def _never_begins(run: Run) -> Run:
    return replace(run, begins=False)


def _always_begins(run: Run) -> Run:
    return replace(run, begins=True)


def _other_slot(run: Run) -> Run:
    return replace(run, slots=FIRST_SLOT + 1 - (run.slots - FIRST_SLOT))


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next"])
@pytest.mark.parametrize("fault", [_never_begins, _always_begins, _other_slot])
def test_the_self_check_finds_faults_of_states(
    monkeypatch: pytest.MonkeyPatch, model_type: str, fault: Callable[[Run], Run]
) -> None:
    begin = RecurrentStates.begin

    def wrong(self: RecurrentStates, step: Step, *, probes: bool = False) -> None:
        begin(self, step, probes=probes)
        # The second chunk and the other prompt are the faulty step: the first one would be as wrong by itself.
        self.step.runs = tuple(map(fault, self.step.runs or ())) if len(self.step.runs or ()) > 1 else self.step.runs

    monkeypatch.setattr(RecurrentStates, "begin", wrong)
    with pytest.raises(NotPageable, match="differ from its own forward"):
        PagedRunner(tiny(model_type), select_device("cpu"), CONFIG, max_model_len=64).close()


def test_the_self_check_finds_that_decode_reads_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    batched = recurrent.ServedLayer.batched

    def wrong(self: Any, module: Any, args: Any, kwargs: Any, states: SlotStates) -> Any:
        return batched(self, module, args, kwargs, SlotStates(states.slots.flip(0)))

    monkeypatch.setattr(recurrent.ServedLayer, "batched", wrong)
    with pytest.raises(NotPageable, match="one decode step"):
        PagedRunner(tiny("lfm2"), select_device("cpu"), CONFIG, max_model_len=64).close()


@pytest.mark.slow
def test_prompts_run_eagerly_where_their_graphs_compute_something_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of = TokenStates.of

    def wrong(slots: Tensor, *args: Any) -> TokenStates:
        return of(slots.flip(0), *args)

    config = replace(CONFIG, prefill_buckets=(32,), options=CompileOptions(lowering="inline", cache=False))
    reasons = []
    for function in (of, wrong):
        monkeypatch.setattr(TokenStates, "of", function)
        runner = PagedRunner(tiny("lfm2"), acme(), config, max_model_len=64)
        reasons.append((runner.report().modes["prefill"], runner.reason.rpartition("; ")[2]))
        runner.close()
    assert reasons[0] == ("piecewise", "1 layers keep recurrent states in slots, and prompts share no beginning")
    assert reasons[1] == ("off", "prompts run eagerly")
    assert "in graphs, a prefill and one decode step on the paged cache differ from its own forward" in caplog.text


def _in_the_spelling_before_5_21(module: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> Tensor:
    """A short convolution that reads its state from the cache's layer, as layers of transformers before 5.21 do."""
    b, c, x = module.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
    values, weight = b * x, module.conv.weight
    before = past_key_values is not None and past_key_values.has_previous_state(module.layer_idx)
    if before and values.shape[-1] == 1 and not past_key_values.layers[module.layer_idx].record_past:
        state = past_key_values.layers[module.layer_idx].conv_states[0]
        full = torch.cat([state[..., 1:], values], dim=-1)
        state.copy_(full)
        out = (full * weight[:, 0]).sum(-1, keepdim=True)
    else:
        full, width = values, weight.shape[-1]
        if past_key_values is not None:
            full = past_key_values.update_conv_state(values, module.layer_idx, conv_kernel_size=width)
        padded = torch.nn.functional.pad(full, (width - 1, 0))
        out = torch.nn.functional.conv1d(padded, weight, groups=weight.shape[0])[..., -values.shape[-1] :]
    return module.out_proj((c * out).transpose(-1, -2))


@pytest.mark.slow
def test_layers_that_read_their_states_from_the_caches_layers_are_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Cache

    for name in ("get_conv_state", "get_recurrent_state"):
        monkeypatch.delattr(Cache, name, raising=False)
    recurrent_inspection._noting_class.cache_clear()
    model = tiny("lfm2")
    expected = own_logits(model, probe_sequences(model, max_model_len=64, max_num_seqs=2))
    convolution = type(next(m for m in model.modules() if type(m).__name__.endswith("ShortConv")))
    monkeypatch.setattr(convolution, "forward", _in_the_spelling_before_5_21)
    try:
        own = own_logits(model, probe_sequences(model, max_model_len=64, max_num_seqs=2))
        assert largest_difference(own, expected) < 1e-5
        runner = PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=64)
        assert "1 layers keep recurrent states in slots" in runner.reason
        runner.close()
        stale = SlotStates.taken
        monkeypatch.setattr(SlotStates, "taken", lambda *given: torch.zeros_like(stale(*given)))
        with pytest.raises(NotPageable, match="differ from its own forward"):
            PagedRunner(model, select_device("cpu"), CONFIG, max_model_len=64)
    finally:
        recurrent_inspection._noting_class.cache_clear()


def test_tokens_as_a_batch_are_multiplied_in_one_product() -> None:
    layer = torch.nn.Linear(8, 4)
    tokens = torch.randn(1, 200, 8)
    with OpsSeen() as seen, torch.no_grad():
        out = layer(recurrent._as_batch(tokens))
    assert "aten.bmm.default" not in seen.names  # by a transposition, each token takes a copy of the weight
    assert torch.equal(recurrent._as_tokens(out), layer(tokens))


def test_a_steps_cache_tells_whether_sequences_have_states_as_transformers_before_5_21_asks() -> None:
    state = torch.zeros(1, 2)
    cache = StepCache({("conv", 0, 0): state, ("recurrent", 0, 0): state, ("conv", 1, 0): None}, {})
    assert cache.has_previous_state(0) and cache.has_previous_state(0, 0)
    assert not cache.has_previous_state(1) and not cache.has_previous_state()  # OLMo hybrid asks for no layer
    assert cache.layers[0].conv_states == {0: state} and cache.layers[1].recurrent_states == {}
    assert not cache.layers[0].record_past
