"""The functions that the paged route compiles: a model over the flattened tokens of one step, and the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from core.compilation.capture.breaks import hold
from core.engine.config import Sampling
from core.engine.heads.states import HiddenStates
from core.engine.inspect.attention import StepTensors
from core.engine.lora.memory import AdapterMemory
from core.engine.models.forward import accepted_arguments
from core.engine.models.sharding.gathering import HeadParts, argmax_of_parts
from core.engine.paged.past import PagedPast
from core.engine.paged.step_states import RecurrentStep, SlotStates, TokenStates
from core.engine.steps.histories import STEP_OF_HISTORIES, Histories
from core.engine.steps.inputs import table_names
from core.engine.steps.positions import ServedPositions
from core.engine.steps.sampling import TokensAndLogits, Ways, with_tokens


class PagedLogits:
    """The model over the flattened tokens of one step, for one phase: its logits."""

    def __init__(
        self,
        model: Any,
        steps: Sequence[StepTensors],
        max_query_len: int,
        *,
        positions: ServedPositions,
        states: HiddenStates | None = None,
        states_group: int = 0,
        adapters: AdapterMemory | None = None,
        recurrent: RecurrentStep | None = None,
        head: HeadParts | None = None,
        past: PagedPast | None = None,
    ) -> None:
        """steps: what the layers of each group read. positions: how the model is told a step's. states: what the model
        writes or reads in the slots of a group. adapters: those that its linear layers have. recurrent: what the layers
        that keep recurrent states read; before a call with prompts, `RecurrentStates.begin` has to be told of its step.
        head: of a model that processes share, one for all calls of a runner. past: what its layers get for
        transformers' cache."""
        self._model = model
        self._steps = tuple(steps)
        self._names = [table_names(group) for group in range(len(self._steps))]
        self._max_query_len = max_query_len
        self._positions = positions
        self._states = states
        self._state_slots = table_names(states_group)[1]
        self._adapters = adapters
        self._recurrent = recurrent
        self._past = past
        self.head = head
        steps_and_more = (*self._steps, positions, states, adapters)
        self._held = tuple(held for each in steps_and_more if each is not None for held in each.held)
        if recurrent is not None:
            self._held += tuple((recurrent, name) for name in ("batch", "runs", "order"))
        self._selects_rows = "logits_to_keep" in accepted_arguments(model)

    def __repr__(self) -> str:
        return type(self._model).__name__  # named so in reports and in errors of tracing

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
        logit_rows: Tensor,
        lora: bool = False,
        **tables: Tensor,
    ) -> Tensor:
        """Return logits (rows, vocabulary) after the tokens at logit_rows; shapes as in `step_inputs`.

        lora: a guard; whether tokens have adapters. tables: the block table and the slot mapping of each group of
        layers, and what else `step_inputs` declares.
        """
        for step, (table, slots) in zip(self._steps, self._names, strict=True):
            step.block_table, step.slot_mapping = tables[table], tables[slots]
            step.seq_lens, step.query_starts, step.max_query_len = seq_lens, query_starts, self._max_query_len
        if self._states is not None:
            self._states.slots, self._states.next_slots = tables[self._state_slots], tables.get("next_slots")
        if lora:
            assert self._adapters is not None
            self._adapters.begin_step(tables["adapter_slots"])
        if self._recurrent is not None:
            self._recurrent.batch = self._batch(tables["state_slots"], seq_lens, query_starts, tables["in_prompt"])
        arguments: dict[str, Any] = {"logits_to_keep": logit_rows} if self._selects_rows else {}
        arguments |= self._positions.begin(position_ids[None], input_ids[None])
        if self._past is not None:
            arguments |= self._past.arguments(position_ids, self._steps[0])
        hold(self._held)
        output = self._model(input_ids=input_ids[None], use_cache=False, return_dict=True, **arguments)
        hold(())
        for step in self._steps:
            step.clear()
        self._positions.clear()
        if self._states is not None:
            self._states.clear()
        if self._adapters is not None:
            self._adapters.end_step()
        if self._recurrent is not None:
            self._recurrent.batch = None
        logits: Tensor = output.logits[0]
        return logits if self._selects_rows else logits[logit_rows]

    def _batch(
        self, slots: Tensor, seq_lens: Tensor, query_starts: Tensor, in_prompt: Tensor
    ) -> SlotStates | TokenStates | None:
        """Return the states of a step's tokens as a batch; None where it runs eagerly on runs."""
        if self._max_query_len == 1:
            return SlotStates(slots)
        if is_dynamo_compiling():
            return TokenStates.of(slots, seq_lens, query_starts, in_prompt)
        return None

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep recurrent states, which each call moves on."""
        return self._recurrent is not None

    def shown(self, shows: Literal["part", "repeated"], **step: Any) -> Tensor:
        """Return the logits from what this process has of the head's results, once or once for each process.

        (rows, vocabulary / processes), or (rows, vocabulary). Takes what a call takes.
        """
        assert self.head is not None
        self.head.gathering.shows = shows
        try:
            return self(**step)
        finally:
            self.head.gathering.shows = "whole"


class PagedCall:
    """The function that is compiled: one step of the model and the choice of the next tokens."""

    def __init__(self, logits: PagedLogits, histories: Histories | None = None) -> None:
        """histories: what "shaped" takes."""
        self.logits = logits
        self._histories = histories

    def __repr__(self) -> str:
        return repr(self.logits)

    def __call__(
        self,
        *,
        sampling_params: Tensor,
        history_rows: Tensor | None = None,
        sampling: Ways = "greedy",
        lora: bool = False,
        **step: Tensor,
    ) -> TokensAndLogits:
        """Return tokens (rows,) and the model's logits (rows, vocabulary), or this process's part of them (`gather`).

        sampling: a guard, or several of its values (`with_tokens`), where not `chooses_apart`; with "shaped", the
        tokens are those of `Histories.choose`. lora: a guard; see `PagedLogits`.
        """
        head = self.logits.head
        if sampling == "greedy" and head is not None and head.chosen_apart:
            part = self.logits.shown("part", lora=lora, **step)
            return argmax_of_parts(part, head.gathering.group), part
        logits = self.logits(lora=lora, **step)
        if sampling == "shaped":
            assert history_rows is not None and self._histories is not None
            inputs = {name: step[name] for name in STEP_OF_HISTORIES}
            return self._histories.choose(logits, sampling_params, history_rows=history_rows, **inputs), logits
        return with_tokens(logits, sampling_params, sampling)

    @property
    def chooses_apart(self) -> bool:
        """Whether greedy tokens are chosen of each process's own logits, so that other ways need another model."""
        return self.logits.head is not None and bool(self.logits.head.chosen_apart)

    def probed(self, **step: Any) -> Tensor:
        """Return the model's logits, and find out whether each process can choose among those that it has.

        Layers that keep recurrent states would move on twice: there all logits are gathered.
        """
        logits = self.logits(**step)
        if self.logits.head is not None and not self.logits.keeps_states:
            self.logits.head.compare(logits, self.logits.shown("repeated", **step))
        return logits

    def gather(self, sampling: Sampling) -> Callable[[Tensor], Tensor] | None:
        """Return what makes the logits of a call whole, with the other processes; None where they are."""
        head = self.logits.head
        return head.gathering.whole if sampling == "greedy" and head is not None and head.chosen_apart else None
