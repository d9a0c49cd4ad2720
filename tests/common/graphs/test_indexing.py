"""core/common/graphs/indexing.py: an index out of range is an error before the device sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.graphs.indexing import checked_indices
from core.common.graphs.torch_modes import entered
from core.engine.inspect.attention import NotPageable, inspect
from core.engine.inspect.probe import counts_from_zero
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config

CPU = torch.device("cpu")
X = torch.arange(12.0).view(3, 4)


class Accelerator(TorchDispatchMode):
    """Stands for a device: an op that fails there has been lost with all that runs on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.died_of: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError) as error:
            self.died_of.append(f"{func}: {error}")
            raise


def row(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


OUTSIDE: dict[str, Callable[[], object]] = {
    "embedding": lambda: nn.functional.embedding(row(0, 3), X),
    "a negative row of an embedding": lambda: nn.functional.embedding(row(-1), X),
    "index": lambda: X[row(0, 1), row(3, 4)],
    "index from the end": lambda: X[row(-4)],
    "index behind a mask": lambda: X.view(3, 2, 2)[torch.ones(3, 2, dtype=torch.bool), row(2)],
    "index_put": lambda: X.clone().index_put_((row(3),), torch.zeros(())),
    "setitem": lambda: X.clone().__setitem__((slice(None), row(4)), 0.0),
    "gather": lambda: X.gather(1, torch.full((3, 1), 4)),
    "scatter": lambda: X.scatter(0, torch.full((1, 4), 3), X),
    "scatter_add": lambda: X.clone().scatter_add_(1, torch.full((3, 1), -1), X),
    "index_select": lambda: X.index_select(1, row(4)),
    "index_copy": lambda: X.clone().index_copy_(0, row(3), X[:1]),
    "index_add": lambda: X.clone().index_add_(0, row(3), X[:1]),
    "index_fill": lambda: X.index_fill(1, row(-5), 0.0),
    "take": lambda: X.take(row(12)),
    "masked_scatter": lambda: X.masked_scatter(X > 3, torch.zeros(2)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_range_never_reaches_the_device(name: str) -> None:
    with Accelerator() as device, pytest.raises((IndexError, RuntimeError)):
        OUTSIDE[name]()
    assert device.died_of
    with Accelerator() as device, checked_indices(), pytest.raises((IndexError, RuntimeError)):
        OUTSIDE[name]()
    assert not device.died_of


def test_the_error_says_which_index() -> None:
    with checked_indices(), pytest.raises(IndexError, match="index 4 is out of bounds for dimension 1 with size 4"):
        X[row(0), row(4)]


def test_an_assertion_on_values_is_an_error_of_the_host() -> None:
    with Accelerator() as device, checked_indices(), pytest.raises(AssertionError, match="positive"):
        torch._assert_async(torch.tensor(False), "must be positive")
    assert not device.died_of


def test_what_is_in_range_is_computed_as_always() -> None:
    mask = torch.tensor([True, False, True])
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: X[row(-3, 2), :, None],
        lambda: X[mask, row(-1, 0)],
        lambda: X[:, row()],
        lambda: X.gather(1, torch.full((3, 1), 3)),
        lambda: X.index_fill(1, row(-4), 0.0),
        lambda: X.take(row(-12, 11)),
        lambda: torch.tensor(3.0).index_select(0, row(0)),
        lambda: X.masked_scatter(mask[:, None], torch.zeros(8)),
        lambda: torch.vmap(lambda each: X[each, 1])(row(0, 2)),
    )
    expected = [call() for call in calls]
    with checked_indices():
        assert all(torch.equal(call(), value) for call, value in zip(calls, expected, strict=True))


@pytest.mark.parametrize("model_type", ["git", pytest.param("gemma4_unified", marks=pytest.mark.slow)])
def test_a_mask_that_reads_a_table_of_the_tokens_is_refused_and_the_device_lives(model_type: str) -> None:
    model = build_model(tiny_config(model_type), torch_device=CPU, dtype=torch.float32).model
    with Accelerator() as device, pytest.raises(NotPageable):
        inspect(model, max_len=64)
    assert not device.died_of


def test_a_model_whose_positions_count_from_elsewhere_leaves_the_device_alive() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config: Any = SimpleNamespace(
                get_text_config=lambda **_: SimpleNamespace(vocab_size=8, max_position_embeddings=8)
            )
            self.table = nn.Embedding(8, 8)

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Any:
            rows = self.table(input_ids if position_ids is None else position_ids + 4)
            return SimpleNamespace(logits=rows)

    with Accelerator() as device, torch.no_grad(), pytest.raises(IndexError, match="index 11 is out of bounds"):
        counts_from_zero(Shifted())
    assert not device.died_of


def test_threads_that_check_in_crossed_order_leave_torch_compile_as_it_was() -> None:
    first, second = checked_indices(), entered(Accelerator())
    flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for thread, enter in ((one, second), (other, first)):
            thread.submit(enter.__enter__).result()
        for thread, leave in ((one, second), (other, first)):
            thread.submit(leave.__exit__, None, None, None).result()
    assert {name: value for name, value in vars(_python_dispatch).items() if name in flags} == flags
