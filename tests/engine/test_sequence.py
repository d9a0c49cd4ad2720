"""Sequences and the tensors of a step."""

from __future__ import annotations

import torch

from core.engine.config import SamplingParams
from core.engine.sequence import Sequence, step_inputs, step_tensors

CPU = torch.device("cpu")


def sequence(
    prompt: list[int], *, blocks: list[int], generated: list[int] | None = None, computed: int = 0
) -> Sequence:
    return Sequence(0, prompt, SamplingParams(), generated=list(generated or []), blocks=blocks, num_computed=computed)


def test_pending_is_the_prompt_first_and_then_the_latest_token() -> None:
    seq = sequence([5, 6, 7], blocks=[1])
    assert (len(seq), seq.pending()) == (3, [5, 6, 7])
    seq.num_computed = 3
    assert seq.pending() == []
    seq.generated.append(8)
    assert (len(seq), seq.pending()) == (4, [8])


def test_pending_after_a_part_of_the_prompt_is_the_rest_and_what_follows() -> None:
    assert sequence([5, 6, 7], blocks=[1], generated=[8], computed=2).pending() == [7, 8]


def test_a_prefill_step_flattens_sequences_and_finds_their_slots() -> None:
    sequences = [sequence([5, 6, 7, 8, 9], blocks=[3, 1]), sequence([11, 12], blocks=[2])]
    step = step_tensors(sequences, max_blocks=3, block_size=4, device=CPU)
    assert step["input_ids"].tolist() == [5, 6, 7, 8, 9, 11, 12]
    assert step["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert step["slot_mapping"].tolist() == [12, 13, 14, 15, 4, 8, 9]
    assert step["block_table"].tolist() == [[3, 1, 0], [2, 0, 0]]
    assert step["seq_lens"].tolist() == [5, 2]
    assert step["query_starts"].tolist() == [0, 5, 7]
    assert step["logit_rows"].tolist() == [4, 6]


def test_a_decode_step_has_one_token_of_each() -> None:
    sequences = [
        sequence([5, 6, 7, 8], blocks=[3, 1], generated=[9], computed=4),
        sequence([11], blocks=[2], generated=[12, 13], computed=2),
    ]
    step = step_tensors(sequences, max_blocks=2, block_size=4, device=CPU)
    assert step["input_ids"].tolist() == [9, 13]
    assert step["position_ids"].tolist() == [4, 2]
    assert step["slot_mapping"].tolist() == [4, 10]
    assert step["logit_rows"].tolist() == [0, 1]


def test_a_step_has_the_declared_names_and_dtypes() -> None:
    step = step_tensors([sequence([5], blocks=[1])], max_blocks=2, block_size=4, device=CPU)
    declared = step_inputs(2)
    assert step.keys() == declared.keys()
    for name, tensor in step.items():
        assert tensor.dtype == declared[name].dtype
        assert tensor.shape == declared[name].resolve({"tokens": 1, "seqs": 1})


def test_padding_belongs_to_no_sequence() -> None:
    declared = step_inputs(2)
    # Rows past the last token begin nowhere: the last start is repeated; all else is 0, the null block's slot.
    assert {name for name, spec in declared.items() if spec.padding == "edge"} == {"query_starts"}
    assert {spec.padding for spec in declared.values()} == {"edge", "zero"}
