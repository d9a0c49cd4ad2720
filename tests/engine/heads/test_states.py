"""Hidden states in the slots of a cache, and what leaves them there."""

from __future__ import annotations

import torch

from core.engine.heads.states import HiddenStates

STATES = torch.arange(6.0).reshape(2, 3) + 1


def test_a_step_writes_the_rows_of_its_tokens_and_nothing_is_written_between_steps() -> None:
    states = HiddenStates(torch.zeros(8, 3))
    states.write(STATES)
    states.guess(STATES)
    assert not states.rows.any() and states.read() is None
    states.slots = torch.tensor([5, 2])
    states.write(STATES.double())
    assert torch.equal(states.rows[[5, 2]], STATES) and states.rows.count_nonzero() == 6
    read = states.read()
    assert read is not None and torch.equal(read, STATES)
    states.guess(STATES)  # a step of the served model has none
    states.next_slots = torch.tensor([6, 0])
    states.guess(STATES * 2)
    assert torch.equal(states.rows[[6, 0]], STATES * 2) and states.rows.count_nonzero() == 12
    states.clear()
    assert states.read() is None and states.next_slots is None
