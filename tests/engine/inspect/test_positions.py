"""How models count positions: from which number, where, and what is refused as not found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from core.engine.inspect.attention import NotPageable
from core.engine.inspect.positions import ZERO_BASED, Counting, Lookup, Rows, find_counting
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config

CPU = torch.device("cpu")
POSITIONS = 256


def tiny(model_type: str, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=CPU, dtype=torch.float32).model


def counting(model: Any, max_len: int = 64, attends: bool = True) -> Counting:
    return find_counting(model, max_len=max_len, attends=attends)


@pytest.mark.parametrize("model_type", ["llama", "opt", "xglm", "whisper"])
def test_most_take_positions_from_zero_whatever_they_add_to_them(model_type: str) -> None:
    assert counting(tiny(model_type)) == ZERO_BASED and ZERO_BASED.ordinary


@pytest.mark.parametrize(("model_type", "padding"), [("roberta", 0), ("roberta", 1), ("camembert", 5)])
def test_some_count_from_after_their_padding_row_and_give_padding_that_row(model_type: str, padding: int) -> None:
    found = counting(tiny(model_type, pad_token_id=padding))
    assert found == Counting(given=Rows(first=padding + 1, padding=(padding, padding), size=POSITIONS))
    assert not found.ordinary


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("model_type", "path", "first", "batched"),
    [
        ("bart", "model.decoder.embed_positions", 2, True),
        ("marian", "model.decoder.embed_positions", 0, False),
        ("pegasus", "model.decoder.embed_positions", 0, False),
    ],
)
def test_some_take_none_and_look_up_rows_by_a_count_of_their_own(
    model_type: str, path: str, first: int, batched: bool
) -> None:
    model = tiny(model_type)
    found = counting(model)
    rows = Rows(first=first, size=POSITIONS + first)
    assert found == Counting(lookups={model.get_submodule(path): Lookup(table="weight", rows=rows, batched=batched)})
    assert not found.ordinary


def test_inspecting_leaves_no_hook_behind() -> None:
    model = tiny("bart")
    counting(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_positions_that_are_handed_on_undeclared_are_given() -> None:
    model = tiny("llama")
    own = model.forward

    def forward(input_ids: Tensor, use_cache: bool = False, return_dict: bool = True, **options: Any) -> Any:
        return own(input_ids=input_ids, use_cache=use_cache, **options)

    model.forward = forward
    assert counting(model) == ZERO_BASED


def test_numbers_are_those_of_each_sequence_and_of_padding() -> None:
    positions, tokens = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([5, 1, 5, 1, 6])
    assert Rows(first=2).of(positions, tokens).tolist() == [2, 3, 4, 2, 3]
    assert Rows(first=2, padding=(1, 1)).of(positions, tokens).tolist() == [2, 1, 4, 1, 3]


@pytest.mark.parametrize(("model_type", "longest"), [("bart", POSITIONS), ("roberta", POSITIONS - 1)])
def test_a_context_longer_than_the_table_is_refused(model_type: str, longest: int) -> None:
    model = tiny(model_type)
    counting(model, longest)
    with pytest.raises(NotPageable, match=rf"its table of 25[68] positions ends before a context of {longest + 1}"):
        counting(model, longest + 1)


class Fake(nn.Module):
    """A model of one table, whose rows are looked up by whatever `numbers` makes of the tokens."""

    def __init__(self, numbers: Callable[[Tensor], Tensor], *, more: float = 0.0) -> None:
        super().__init__()
        text = SimpleNamespace(vocab_size=64, max_position_embeddings=64, pad_token_id=None)
        self.config: Any = SimpleNamespace(get_text_config=lambda **_: text)
        self.words = nn.Embedding(64, 16)
        self.rows = Table(numbers, more)

    def forward(self, input_ids: Tensor, use_cache: bool = False, return_dict: bool = True) -> Any:
        return SimpleNamespace(logits=self.words(input_ids) + self.rows(input_ids))


class Table(nn.Module):
    def __init__(self, numbers: Callable[[Tensor], Tensor], more: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 16))
        self._numbers, self._more = numbers, more

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = functional.embedding(self._numbers(input_ids), self.table)
        return rows + self._more if self._more else rows


def _ahead(ids: Tensor) -> Tensor:
    return torch.arange(7, 7 + ids.shape[1])[None]


def _back(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).flip(0)[None]


def _doubled(ids: Tensor) -> Tensor:
    return 2 * torch.arange(ids.shape[1])[None]


def test_a_table_is_found_wherever_it_is_looked_up_and_under_any_name() -> None:
    model = Fake(_ahead)
    rows = Rows(first=7, size=64)
    assert counting(model, 57) == Counting(lookups={model.rows: Lookup(table="table", rows=rows, batched=True)})


@pytest.mark.parametrize(
    "model", [Fake(_back), Fake(_doubled), Fake(lambda ids: ids), Fake(_ahead, more=1.0)],
    ids=["back", "doubled", "by_tokens", "more_than_rows"],
)  # fmt: skip
def test_what_counts_otherwise_or_gives_more_than_rows_is_not_taken_for_a_count(model: nn.Module) -> None:
    with pytest.raises(NotPageable, match="none of its modules looks up rows by a count of its own"):
        counting(model)


def test_without_attention_a_model_may_have_no_positions() -> None:
    assert counting(Fake(_back), attends=False) == Counting() and Counting().ordinary


def test_given_positions_that_mean_something_else_are_refused() -> None:
    class Turned(Fake):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Any:
            logits = self.words(input_ids) + self.rows(input_ids)
            return SimpleNamespace(logits=logits if position_ids is None else logits * (1 + position_ids[..., None]))

    with pytest.raises(NotPageable, match="given position_ids it computes otherwise than by its own count"):
        counting(Turned(_ahead))
