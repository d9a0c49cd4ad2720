"""core/common/passes/linear/merge.py: weights keep their identity, and none is held twice or left behind."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.passes.linear.merge import MERGE_LINEARS
from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.tracing import trace
from tests.common.passes.linear.merging import Decoder, Merged, Mlp, Pair, constants_of, plain, tokens


def test_weights_keep_their_identity_values_and_place_in_the_model(tmp_path: Path) -> None:
    model = Decoder(2)
    parameters = dict(model.named_parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = Merged(model, tokens())
    assert merged.report.matched == 4
    assert all(parameters[name] is tensor for name, tensor in model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.2 * sum(tensor.nbytes for tensor in before.values())
    file.seek(0)
    copy = Decoder(2)
    copy.load_state_dict(torch.load(file))
    assert torch.equal(copy(merged.x), model(merged.x))


def test_weights_loaded_in_place_reach_the_merged_graph() -> None:
    model, other = Decoder(2), Decoder(2)
    for parameter in other.parameters():
        parameter.mul_(0.5)
    merged = Merged(model, tokens())
    before = merged.run().outputs[0]
    model.load_state_dict(other.state_dict())
    assert not torch.allclose(merged.run().outputs[0], before)
    torch.testing.assert_close(merged.run().outputs[0], other(merged.x), rtol=1e-5, atol=1e-5)


class Allocations(TorchDispatchMode):
    """The most bytes that lay in real storages at once, those given at the start included."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in tensors:
            self._note(tensor)
        self.at_start = self.peak = self._bytes()

    def _note(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _bytes(self) -> int:
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor):
            self._note(result)
        self.peak = max(self.peak, self._bytes())
        return result


def merge_tracked(model: nn.Module) -> tuple[Allocations, int]:
    graph = trace(model, {"x": tokens()})
    allocations = Allocations(list(model.parameters()))
    with allocations:
        (report,) = PassManager([MERGE_LINEARS], strict=True).run(graph.module, constants=constants_of(graph))
    return allocations, report.matched


@pytest.mark.slow
def test_no_weight_is_held_twice() -> None:
    allocations, matched = merge_tracked(Decoder(12))
    assert matched == 24
    assert 1.0 < allocations.peak / allocations.at_start <= 1.1
    assert allocations._bytes() <= 1.01 * allocations.at_start


@pytest.mark.slow
def test_the_count_of_memory_sees_what_is_held_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Tensor] = []
    real = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: held.extend(t.clone() for t in tensors) or real(tensors))  # type: ignore[func-returns-value]
    allocations, matched = merge_tracked(Decoder(12))
    assert matched == 24 and allocations.peak / allocations.at_start > 1.5


@pytest.mark.slow
def test_a_second_graph_of_the_model_binds_the_same_memory() -> None:
    model = Decoder(2, kinds="b-b")
    first, second = Merged(model, tokens(num=5)), Merged(model, tokens(num=1))
    assert second.report.matched == 4 and second.report.near_misses == ()
    assert [t.data_ptr() for _, t in first.constants.added] == [t.data_ptr() for _, t in second.constants.added]
    second.check_numbers()


def test_a_fused_checkpoint_is_used_as_it_lies() -> None:
    model = Mlp().requires_grad_(False)
    whole = torch.randn(256, 64) / 8
    model.gate_proj.weight.data, model.up_proj.weight.data = whole[:128], whole[128:]
    merged = Merged(model, tokens())
    ((_, tensor),) = merged.constants.added
    assert tensor.data_ptr() == whole.data_ptr()
    merged.check_numbers()


def test_layers_that_share_weights_share_the_merged_one() -> None:
    model = Mlp().requires_grad_(False)
    merged = Merged(lambda x: model(model(x) + x), tokens())
    assert merged.report.matched == 2 and len(merged.constants.added) == 1
    merged.check_numbers()


def odd(pair: Pair) -> Any:
    pair.a = nn.Linear(64, 33, bias=False).requires_grad_(False)
    pair.join = lambda pair, x: pair.a(x)[..., :32] * pair.b(x)


def other_rows(pair: Pair) -> Any:
    pair.a.weight.data = torch.randn(64, 32).t()


def trained(pair: Pair) -> Any:
    pair.a.weight.requires_grad_(True)


def looked_at(pair: Pair) -> Any:
    return pair.a.weight.detach()


def cut_out(pair: Pair) -> Any:
    pair.a.weight.data = torch.randn(40, 64)[4:36]


class Special(nn.Parameter):
    pass


def subclassed(pair: Pair) -> Any:
    pair.a.weight = Special(pair.a.weight.detach(), requires_grad=False)


UNFIT_WEIGHTS: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "a width that kernels do not like": (odd, "off 16 bytes"),
    "not contiguous": (other_rows, "one is not contiguous"),
    "gradients": (trained, "requires a gradient"),
    "memory that others look at": (looked_at, "shares its memory"),
    "part of a larger tensor": (cut_out, "part of a larger tensor"),
    "a tensor subclass, traced as the plain tensor it holds": (subclassed, "shares its memory"),
}


@pytest.mark.parametrize("case", UNFIT_WEIGHTS)
def test_weights_that_can_not_be_moved_stay_where_they_are(case: str) -> None:
    change, reason = UNFIT_WEIGHTS[case]
    model = Pair(plain)
    held = change(model)
    merged = Merged(model, tokens())
    assert merged.report.matched == 0 and merged.constants.added == ()
    assert any(reason in miss.reason for miss in merged.report.near_misses), merged.report.near_misses
    assert all(map(torch.equal, merged.run().outputs, merged.before.outputs))
    if case == "gradients":
        with torch.no_grad():
            assert Merged(model, tokens()).report.matched == 1
    del held


def test_a_weight_goes_into_one_joined_tensor_only() -> None:
    a, b, c = (nn.Linear(64, 64, bias=False).requires_grad_(False) for _ in range(3))

    def function(x: Tensor) -> Any:
        y = a(x).sin() * b(x)
        return c(y).sin() * a(y)

    merged = Merged(function, tokens())
    assert merged.report.matched == 1
    assert "part of a larger tensor" in merged.report.near_misses[0].reason
    merged.check_numbers()


def test_a_tied_embedding_reads_the_same_memory() -> None:
    embedding, other = torch.randn(32, 64), torch.randn(32, 64)

    def function(x: Tensor) -> Tensor:
        y = nn.functional.embedding(torch.arange(5), embedding) + x
        return nn.functional.linear(y, embedding).sin() * nn.functional.linear(y, other)

    merged = Merged(function, tokens())
    assert merged.report.matched == 1
    assert embedding.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    merged.check_numbers()
