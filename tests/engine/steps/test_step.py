"""What a step computes and the tensors that say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.engine.config import Phase, SamplingParams
from core.engine.steps import inputs
from core.engine.steps.inputs import Written, step_inputs, step_tensors, write_step
from core.engine.steps.sampling import make_generator
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Part, Step, rows_ahead

CPU = torch.device("cpu")
HOT = SamplingParams(temperature=0.5, top_k=7, top_p=0.75, seed=1)


def sequence(
    prompt: list[int], *, blocks: list[int], generated: tuple[int, ...] = (), computed: int = 0, hot: bool = False
) -> Sequence:
    params = HOT if hot else SamplingParams()
    found = Sequence(0, prompt, params, make_generator(params), list(generated), [blocks])
    found.num_computed = computed
    return found


def tensors(phase: Phase, *parts: Part, max_blocks: int = 3) -> dict[str, Any]:
    step = step_tensors(Step(phase, parts), max_blocks=max_blocks, block_size=4, device=CPU)
    return {name: tensor.tolist() for name, tensor in step.items()}


def test_a_prefill_step_flattens_sequences_and_finds_their_slots() -> None:
    first, second = sequence([5, 6, 7, 8, 9], blocks=[3, 1]), sequence([11, 12], blocks=[2])
    step = tensors("prefill", Part(first, 5), Part(second, 2))
    assert step["input_ids"] == [5, 6, 7, 8, 9, 11, 12]
    assert step["position_ids"] == [0, 1, 2, 3, 4, 0, 1]
    assert step["slot_mapping"] == [12, 13, 14, 15, 4, 8, 9]
    assert step["block_table"] == [[3, 1, 0], [2, 0, 0]]
    assert step["seq_lens"] == [5, 2]
    assert step["query_starts"] == [0, 5, 7]
    assert step["logit_rows"] == [4, 6]


def test_a_chained_step_knows_the_slot_behind_each_row() -> None:
    emitting = sequence([5, 6, 7, 8], blocks=[3, 1], computed=2)  # the next token begins a block
    silent, last = sequence([11, 12], blocks=[2]), sequence([21], blocks=[4])
    parts = Part(emitting, 2), Part(silent, 2), Part(last, 1)
    parts[1].emits = False
    step = Step("prefill", parts)
    chained = step_tensors(step, max_blocks=3, block_size=4, device=CPU, chained=True)
    assert chained["next_slots"].tolist() == [4, 2, 17]  # a slot of the null block for what has no next token
    assert step_inputs(3, chained=True).keys() - step_inputs(3).keys() == {"next_slots"}
    for part in parts:
        part.emits = False
    assert not step_tensors(step, max_blocks=3, block_size=4, device=CPU, chained=True)["next_slots"].any()


@pytest.mark.parametrize("place", ["put", "_logit_rows", "_write_tokens"])
def test_an_interrupt_while_inputs_are_written_leaves_nothing_noted(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is noted as written is skipped by the next step, so it must be there."""
    first, second = sequence([5, 6, 7], blocks=[3], computed=2), sequence([8, 9, 10], blocks=[4], computed=2)
    other = sequence([11, 12, 13, 14], blocks=[6])
    step, mixed = Step("decode", (Part(first, 1), Part(second, 1))), Step("prefill", (Part(other, 4), Part(second, 1)))
    sizes = {"tokens": 6, "seqs": 3, "rows": 3}
    arrays = {name: torch.zeros(spec.resolve(sizes), dtype=spec.dtype).numpy() for name, spec in step_inputs(3).items()}
    written, calls = Written([0] * 3), [0]
    write_step(step, arrays, block_size=4, written=written)
    expected = {name: array.copy() for name, array in arrays.items()}
    write, undisturbed = getattr(inputs, place), 0
    for number in range(12):  # at each call of it in turn

        def interrupted(*args: Any, last: int = number, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > last:
                raise KeyboardInterrupt
            return write(*args, **kwargs)

        calls[0] = 0
        monkeypatch.setattr(inputs, place, interrupted)
        try:
            write_step(mixed, arrays, block_size=4, written=written)
            undisturbed += 1
        except KeyboardInterrupt:
            pass
        monkeypatch.undo()
        write_step(step, arrays, block_size=4, written=written)
        assert all((arrays[name] == expected[name]).all() for name in expected)
    assert 0 < undisturbed < 12


def test_a_decode_step_has_one_token_of_each() -> None:
    first = sequence([5, 6, 7, 8], blocks=[3, 1], generated=(9,), computed=4)
    second = sequence([11], blocks=[2], generated=(12, 13), computed=2)
    step = tensors("decode", Part(first, 1), Part(second, 1))
    assert step["input_ids"] == [9, 13]
    assert step["position_ids"] == [4, 2]
    assert step["slot_mapping"] == [4, 10]
    assert step["seq_lens"] == [5, 3]
    assert step["logit_rows"] == [0, 1]


def test_a_mixed_step_holds_a_generating_sequence_and_a_chunk_of_a_prompt() -> None:
    generating = sequence([5, 6, 7, 8], blocks=[3, 1], generated=(9,), computed=4)
    chunk = sequence([21, 22, 23, 24, 25, 26], blocks=[2, 4], computed=2)
    parts = (Part(generating, 1), Part(chunk, 3))
    assert [part.emits for part in parts] == [True, False]
    step = tensors("prefill", *parts)
    assert step["input_ids"] == [9, 23, 24, 25]
    assert step["position_ids"] == [4, 2, 3, 4]
    assert step["slot_mapping"] == [4, 10, 11, 16]
    assert step["seq_lens"] == [5, 5]  # what the chunk leaves for later is not in the cache
    assert step["logit_rows"] == [0, 3]


def test_a_part_may_hold_the_end_of_a_prompt_and_what_follows_it() -> None:
    first = sequence([5, 6, 7, 8], blocks=[3, 1], generated=(9,), computed=3)
    step = tensors("prefill", Part(first, 2), Part(sequence([11], blocks=[2]), 1))
    assert step["input_ids"] == [8, 9, 11]
    assert step["slot_mapping"] == [15, 4, 8]
    assert step["query_starts"] == [0, 2, 3]


def test_a_step_behind_another_knows_all_but_the_tokens() -> None:
    first = sequence([5, 6, 7, 8], blocks=[3, 1], generated=(9,), computed=4)
    second = sequence([11], blocks=[2, 3], generated=(12, 13), computed=2)
    second.index = 1
    before = Step("decode", (Part(first, 1), Part(second, 1)))
    for part in before.parts:
        part.launched()
    assert (len(first), first.num_pending, first.num_known) == (6, 1, 5)
    joining = sequence([21, 22], blocks=[4])
    behind = Step("prefill", (Part(second, 1), Part(first, 1), Part(joining, 2)))
    assert [part.ahead for part in behind.parts] == [True, True, False]
    assert rows_ahead(behind, before) == [1, 0]
    step = tensors("prefill", *behind.parts)
    assert (step["input_ids"], step["position_ids"]) == ([0, 0, 21, 22], [3, 5, 0, 1])
    assert step["slot_mapping"] == [11, 5, 16, 17]
    for part in behind.parts:
        part.launched()
    for part in before.parts:
        part.undone()
    assert (len(first), first.num_computed, len(second), second.num_computed) == (5, 4, 3, 2)


def test_a_preempted_sequence_is_computed_from_its_first_token() -> None:
    each = sequence([5, 6, 7], blocks=[3, 1], generated=(8, 9), computed=0)
    assert each.in_prompt and each.num_pending == 5
    assert not Part(each, 4).emits and Part(each, 5).emits
    step = tensors("prefill", Part(each, 5))
    assert (step["input_ids"], step["position_ids"]) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4])
    each.num_computed = 2
    assert tensors("prefill", Part(each, 2))["input_ids"] == [7, 8]
    each.num_computed = 4
    assert not each.in_prompt


def test_each_group_of_layers_has_tables_of_its_own() -> None:
    each = sequence([5, 6, 7, 8, 9], blocks=[3, 1])
    each.tables.append([2, 4])
    step = step_tensors(Step("prefill", (Part(each, 5),)), max_blocks=3, block_size=4, device=CPU, groups=slice(0, 2))
    assert step["block_table"].tolist() == [[3, 1, 0]] and step["block_table_1"].tolist() == [[2, 4, 0]]
    assert step["slot_mapping"].tolist() == [12, 13, 14, 15, 4]
    assert step["slot_mapping_1"].tolist() == [8, 9, 10, 11, 16]
    assert step_inputs(3, 2).keys() - step_inputs(3).keys() == {"block_table_1", "slot_mapping_1"}


def test_a_sequence_without_blocks_for_its_tokens_is_no_step() -> None:
    with pytest.raises(AssertionError):
        tensors("prefill", Part(sequence([5, 6, 7, 8, 9], blocks=[3]), 5))


def test_a_verify_step_has_drafts_behind_the_pending_token_and_wants_all_rows() -> None:
    first = sequence([5, 6, 7], blocks=[3, 1], generated=(9,), computed=3)
    second = sequence([11], blocks=[2], generated=(12,), computed=1)
    step = tensors("verify", Part(first, 1, (30, 31)), Part(second, 1))
    assert step["input_ids"] == [9, 30, 31, 12]
    assert step["position_ids"] == [3, 4, 5, 1]
    assert step["slot_mapping"] == [15, 4, 5, 9]
    assert step["seq_lens"] == [6, 2]
    assert step["query_starts"] == [0, 3, 4]
    assert step["logit_rows"] == [0, 1, 2, 3]


def test_the_parameters_of_each_row_carry_the_number_of_its_token() -> None:
    hot = sequence([5], blocks=[1], generated=(6, 7), computed=2, hot=True)
    step = Step("verify", (Part(sequence([5], blocks=[2], generated=(6,), computed=1), 1), Part(hot, 1, (8,))))
    assert step.sampling == "random" and step.num_rows == 3
    packed = step.sampling_params(CPU)
    assert packed.dtype == torch.float32
    assert packed[:, :3].tolist() == [[0, 0, 1], [0.5, 7, 0.75], [0.5, 7, 0.75]]
    assert packed[1:, 3].tolist() == [hot.uniform(2), hot.uniform(3)]


def test_a_chunk_of_a_prompt_samples_nothing() -> None:
    step = Step("prefill", (Part(sequence([5, 6, 7], blocks=[1], hot=True), 2),))
    assert step.sampling == "greedy"
    assert step.sampling_params(CPU).tolist() == [[0, 0, 1, 0]]


def test_a_step_has_the_declared_names_and_dtypes() -> None:
    step = Step("prefill", (Part(sequence([5], blocks=[1]), 1),))
    declared = step_inputs(2)
    given = step_tensors(step, max_blocks=2, block_size=4, device=CPU)
    given["sampling_params"] = step.sampling_params(CPU)
    assert given.keys() == declared.keys()
    for name, tensor in given.items():
        assert tensor.dtype == declared[name].dtype
        assert tensor.shape == declared[name].resolve({"tokens": 1, "seqs": 1, "rows": 1})


def test_padding_belongs_to_no_sequence() -> None:
    declared = step_inputs(2)
    # Rows past the last token begin nowhere: the last start is repeated; all else is 0, the null block's slot.
    assert {name for name, spec in declared.items() if spec.padding == "edge"} == {"query_starts"}
    assert {spec.padding for spec in declared.values()} == {"edge", "zero"}
