"""Host-side arguments: renewed before each replay, or the replay is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.common.graphs.backend import GraphKey
from core.errors import CaptureError, UsageError

from core_acme.host_arguments import HOST_ARGUMENTS, window_sum
from core_acme.runner import RecordingBackend

KEY = GraphKey("decode", (2,))
X = torch.arange(8.0).view(2, 4)

torch.library.define("acme_test::shifted", "(Tensor x, int[] by=[1, 2], *, int scale=3) -> Tensor")
torch.library.impl(
    "acme_test::shifted", "CompositeExplicitAutograd", lambda x, by=(1, 2), *, scale=3: x * scale + by[0]
)


def captured(fn: Callable[[], Any], backend: RecordingBackend | None = None, key: GraphKey = KEY) -> Any:
    backend = backend or RecordingBackend()
    with backend.capture_session():
        (out,) = backend.capture_one(key, lambda: (fn(),), {}, lambda: None)
    return backend, out


def test_the_op_sums_windows() -> None:
    assert window_sum(X, [1, 3]).tolist() == [0.0, 15.0]
    assert window_sum(X.bfloat16(), [0, 4]).dtype is torch.bfloat16
    assert window_sum(X[:0], []).shape == (0,)
    torch.library.opcheck(window_sum, (X, [2, 4]))
    for lengths in ([1], [1, 5], [-1, 1]):
        with pytest.raises(UsageError, match="one length per row"):
            window_sum(X, lengths)


def test_the_declared_arguments_exist() -> None:
    for op, names in HOST_ARGUMENTS.items():
        types = {argument.name: str(argument.type) for argument in op._schema.arguments}
        assert {types[name] for name in names} <= {"int", "List[int]"}


def test_each_replay_uses_the_values_of_its_update() -> None:
    backend, out = captured(lambda: window_sum(X, [1, 1]) + window_sum(X * 2, [1, 1]))
    assert backend.host_arguments(KEY) == {"lengths"}
    for lengths in ([2, 3], (4, 0), [1, 1]):
        given = list(lengths)
        backend.update(KEY, {"lengths": given})
        given.clear()
        backend.replay(KEY)
        assert torch.equal(out, window_sum(X, lengths) * 3)


def test_a_replay_without_an_update_is_refused() -> None:
    backend, out = captured(lambda: window_sum(X, [1, 1]))
    for _ in range(2):
        with pytest.raises(CaptureError, match="lengths: not renewed since the last replay"):
            backend.replay(KEY)
        assert backend.can_run(KEY)
        backend.update(KEY, {"lengths": [2, 2]})
        backend.replay(KEY)
        assert out.tolist() == [1.0, 9.0]


def test_the_recorded_values_serve_one_replay_within_the_session() -> None:
    backend = RecordingBackend()
    with torch.no_grad(), backend.capture_session():
        with backend.segment(KEY):
            out = window_sum(X, [1, 2])
        backend.replay(KEY)
        assert out.tolist() == [0.0, 9.0]
        with pytest.raises(CaptureError, match="not renewed"):
            backend.replay(KEY)
        backend.update(KEY, {"lengths": [3, 3]})
    backend.replay(KEY)
    assert out.tolist() == [3.0, 15.0]


@pytest.mark.parametrize(
    ("step", "phrase"),
    [
        ({"length": [1, 2]}, r"with \['length'\]\n  found: its host-side arguments are: lengths"),
        ({"lengths": [1, 2], "more": 1}, r"\['lengths', 'more'\]"),
        ({}, r"with \[\]"),
        ({"lengths": [1]}, "it has 1 entries, and 2 were captured"),
        ({"lengths": 2}, "2 is not a list of ints"),
        ({"lengths": [1, 2.0]}, "is not a list of ints"),
        ({"lengths": [1, True]}, "is not a list of ints"),
        ({"lengths": torch.tensor([1, 2])}, "is not a list of ints"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(step: dict[str, Any], phrase: str) -> None:
    backend, out = captured(lambda: window_sum(X, [1, 1]))
    backend.update(KEY, {"lengths": [2, 2]})
    with pytest.raises(UsageError, match=phrase):
        backend.update(KEY, step)
    backend.replay(KEY)
    assert out.tolist() == [1.0, 9.0]


def test_defaults_and_keywords_are_renewed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.acme_test.shifted.default
    monkeypatch.setitem(HOST_ARGUMENTS, op, frozenset({"by", "scale"}))  # type: ignore[arg-type]
    backend, out = captured(lambda: op(X))
    assert backend.host_arguments(KEY) == {"by", "scale"}
    with pytest.raises(UsageError, match="'scale'\n  found: True is not an int"):
        backend.update(KEY, {"by": [5, 0], "scale": True})
    backend.update(KEY, {"by": [5, 0], "scale": 2})
    backend.replay(KEY)
    assert torch.equal(out, X * 2 + 5)


def test_a_graph_without_host_arguments_needs_no_update() -> None:
    backend, out = captured(lambda: X * 2)
    assert backend.host_arguments(KEY) == frozenset()
    backend.update(KEY, {})
    for _ in range(2):
        backend.replay(KEY)
    assert torch.equal(out, X * 2)


@pytest.mark.parametrize("parts", [False, True])
def test_one_name_with_two_values_is_refused(parts: bool) -> None:
    backend = RecordingBackend()
    with torch.no_grad(), backend.capture_session():
        first = backend.segment(KEY._replace(part=0))
        first.__enter__()
        window_sum(X, [1, 1])
        if parts:
            first.__exit__(None, None, None)
            first = backend.segment(KEY._replace(part=1))
            first.__enter__()
        with pytest.raises(CaptureError, match=r"'lengths' is \[2, 2\] here and \[1, 1\] in an earlier call"):
            try:
                window_sum(X, [2, 2])
            except CaptureError as error:
                first.__exit__(type(error), error, None)
                raise
            first.__exit__(None, None, None)
    assert backend.can_run(KEY._replace(part=0)) is parts
    assert not backend.can_run(KEY._replace(part=1))


def test_an_update_of_a_whole_key_reaches_its_parts() -> None:
    backend = RecordingBackend()
    keys = [KEY._replace(part=number) for number in range(3)]
    with torch.no_grad(), backend.capture_session():
        with backend.segment(keys[0]):
            first = window_sum(X, [1, 1])
        with backend.segment(keys[1]):
            plain = X + 1
        with backend.segment(keys[2]):
            last = window_sum(X * 2, [1, 1])
    assert backend.host_arguments(KEY) == {"lengths"} == backend.host_arguments(keys[2])
    assert backend.host_arguments(keys[1]) == frozenset()
    backend.update(KEY, {"lengths": [2, 4]})
    for key in keys:
        backend.replay(key)
    assert torch.equal(last, first * 2) and torch.equal(first, window_sum(X, [2, 4])) and torch.equal(plain, X + 1)
    backend.replay(keys[1])
    with pytest.raises(CaptureError, match="not renewed"):
        backend.replay(keys[2])


def test_unknown_keys_are_refused() -> None:
    backend, _ = captured(lambda: window_sum(X, [1, 1]))
    for call in (lambda key: backend.host_arguments(key), lambda key: backend.update(key, {"lengths": [1, 1]})):
        with pytest.raises(CaptureError, match=r"of decode\[4\]\n  found: captured keys: decode\[2\]"):
            call(GraphKey("decode", (4,)))
