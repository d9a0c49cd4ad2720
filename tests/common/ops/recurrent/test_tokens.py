"""core/common/ops/recurrent/tokens.py: what states a recurrence runs for one token of each sequence, not for more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from core.common.ops.recurrent import tokens

STATES = torch.arange(12.0).view(4, 3)


def read(starts: list[int], num_tokens: int) -> Tensor:
    found: Tensor = tokens.READ(STATES, torch.tensor([3, 1]), torch.tensor(starts, dtype=torch.int32), num_tokens)
    return found


def test_one_token_of_each_sequence_reads_its_state_and_padding_reads_zeros() -> None:
    assert torch.equal(read([0, 1, 2], 3), torch.stack([STATES[3], STATES[1], torch.zeros(3)]))
    assert torch.equal(read([0, 0, 1], 1), STATES[[1]])


def test_each_sequence_with_a_token_keeps_its_new_state() -> None:
    states, new = STATES.clone(), torch.full((2, 3), 7.0)
    tokens.WRITTEN(states, new, torch.tensor([2, 0]), torch.tensor([0, 1, 1], dtype=torch.int32))
    assert torch.equal(states[2], new[0]) and torch.equal(states[[0, 1, 3]], STATES[[0, 1, 3]])


def test_a_second_token_of_a_sequence_raises() -> None:
    with pytest.raises(RuntimeError, match="a sequence has 2 tokens"):
        read([0, 2, 3], 3)


def test_torch_accepts_the_registrations() -> None:
    starts, checks = torch.tensor([0, 1, 2], dtype=torch.int32), ("test_schema", "test_faketensor")
    torch.library.opcheck(tokens.READ, (STATES, torch.tensor([3, 1]), starts, 2), test_utils=checks)
    torch.library.opcheck(
        tokens.WRITTEN, (STATES.clone(), torch.ones(2, 3), torch.tensor([2, 0]), starts), test_utils=checks
    )


def test_the_first_node_that_states_a_recurrence_is_found() -> None:
    graph = fx.Graph()
    placeholder = graph.placeholder("states")
    assert tokens.first_stated(graph) is None
    node = graph.call_function(tokens.READ, (placeholder, placeholder, placeholder, 2))
    assert tokens.first_stated(graph) is node
