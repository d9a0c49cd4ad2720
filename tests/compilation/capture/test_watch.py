"""core/compilation/capture/watch.py: moved tensors by name, and compiles by name and thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.common.graphs.backend import GraphKey
from core.compilation.capture.watch import CompileWatch, watch_modules
from core.errors import CaptureError
from tests.support import refused

KEY = GraphKey("main", (4,))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("absent", None)


def check(model: nn.Module, watched: Any) -> None:
    for each in watched:
        each.check(KEY)


def replaced(model: Model) -> None:
    model.layer.weight = nn.Parameter(torch.ones(2, 2))


def assigned(model: Model) -> None:
    model.load_state_dict({"layer.weight": torch.ones(2, 2)}, assign=True, strict=False)


def moved(model: Model) -> None:
    model.layer.weight.data = torch.ones(2, 2)


def other_buffer(model: Model) -> None:
    model.scale = torch.ones(2)


def no_buffer(model: Model) -> None:
    model.scale = None


def deleted(model: Model) -> None:
    del model.scale


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replaced, "layer.weight"),
        (assigned, "layer.weight"),
        (moved, "layer.weight"),
        (other_buffer, "scale"),
        (no_buffer, "scale"),
        (deleted, "scale"),
    ],
)
def test_what_has_moved_is_named(change: Callable[[Model], None], name: str) -> None:
    model = Model()
    watched = watch_modules(dict(model.named_modules()))
    assert sorted(each.name for each in watched) == ["layer.weight", "scale"]
    check(model, watched)
    change(model)
    with refused(CaptureError, "replaying main[4]", f"found: {name} ", "in place"):
        check(model, watched)


def test_writes_in_place_are_none_of_it() -> None:
    model = Model()
    watched = watch_modules(dict(model.named_modules()))
    with torch.no_grad():
        model.layer.weight.fill_(3)
        model.scale.copy_(torch.zeros(2))
        model.load_state_dict({"layer.weight": torch.ones(2, 2), "scale": torch.ones(2)})
    check(model, watched)


def fresh() -> Callable[[Tensor], Tensor]:
    """Return a function that torch has not compiled yet."""

    def tripled(x: Tensor) -> Tensor:
        return x * 3

    torch._dynamo.reset_code(tripled.__code__)
    return torch.compile(tripled, backend="eager", dynamic=False)


def test_a_compile_is_counted_by_name_and_place() -> None:
    watch, fn = CompileWatch(), fresh()
    with watch.watching():
        fn(torch.ones(2)), fn(torch.ones(2)), fn(torch.ones(3))
    fn(torch.ones(5))
    ((name, count),) = watch.counts.items()
    assert name.startswith("tripled (test_watch.py:") and count == 2
    watch.raise_pending()


def test_watching_within_watching_counts_once() -> None:
    watch, fn = CompileWatch(), fresh()
    with watch.watching(), watch.watching():
        fn(torch.ones(2))
    with watch.watching():
        fn(torch.ones(3))
    assert sum(watch.counts.values()) == 2


def test_strict_raises_when_asked_once() -> None:
    watch, fn = CompileWatch(strict=True), fresh()
    with watch.watching():
        assert fn(torch.ones(2)).tolist() == [3, 3]
    with refused(CaptureError, "without compiles", "torch compiled tripled"):
        watch.raise_pending()
    watch.raise_pending()


def test_compiles_of_other_threads_do_not_count() -> None:
    watch, fn = CompileWatch(), fresh()
    with watch.watching():
        thread = threading.Thread(target=lambda: fn(torch.ones(2)))
        thread.start()
        thread.join()
    assert not watch.counts


def test_watching_ends_with_an_error_too() -> None:
    watch, fn = CompileWatch(), fresh()
    with pytest.raises(ValueError, match="request"), watch.watching():
        raise ValueError("request")
    fn(torch.ones(2))
    assert not watch.counts
