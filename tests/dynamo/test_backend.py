"""`torch.compile(backend="core")`: what is compiled, what runs as it was traced and why, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from tests.recording import acme

INLINE = {"lowering": "inline"}


class Norm(nn.Module):
    """An RMSNorm as models write it, one call with a name for its tensor."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(input=x.pow(2).mean(-1, keepdim=True) + self.eps))


class Block(nn.Module):
    """Two linears of one input behind a norm."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm, self.one, self.other = Norm(size), nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.one(x) + self.other(x)


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="core", options={**INLINE, **options})


def only_graph() -> Any:
    (graph,) = core.backend_report().graphs
    return graph


@torch.no_grad()
def test_a_model_is_compiled_and_reported() -> None:
    model, x = Block().eval(), torch.randn(4, 32)
    run = compiled(model)
    torch.testing.assert_close(run(x), model(x))
    run(x)
    graph = only_graph()
    assert (graph.name, graph.device, graph.calls, graph.original) == ("Block.forward", "cpu", 2, "")
    assert graph.matched["lift_rms_norm"] == 1
    assert "lift_rms_norm 1" in str(core.backend_report())
    assert core.backend_report(reset=True).calls == 2
    assert core.backend_report().graphs == ()


@torch.no_grad()
def test_a_near_miss_is_no_match() -> None:
    def centred(x: Tensor) -> Tensor:  # divides by the mean's root, not by that of the squares
        return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-5)

    x = torch.randn(4, 32)
    assert torch.equal(compiled(centred)(x), centred(x))
    assert "lift_rms_norm" not in only_graph().matched


@torch.no_grad()
def test_passes_can_be_switched() -> None:
    compiled(Block().eval(), disable_passes=("lift_rms_norm",))(torch.randn(4, 32))
    assert "lift_rms_norm" not in only_graph().matched
    assert only_graph().matched["lift_linear"] == 2


def test_training_runs_as_traced_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Block(), torch.randn(4, 32)
    run = compiled(model)
    with caplog.at_level(logging.WARNING, logger="core.dynamo"):
        run(x).sum().backward()
        run(x).sum().backward()
    assert model.one.weight.grad is not None
    expected = torch.autograd.grad(model(x).sum(), model.one.weight)[0] * 2
    torch.testing.assert_close(model.one.weight.grad, expected)
    graph = only_graph()
    assert "gradients" in graph.original
    assert dict(graph.originals) == {graph.original: 2}
    assert len([r for r in caplog.records if "gradients" in r.message]) == 1
    with torch.no_grad():
        run(x)  # Dynamo compiles again, and this graph needs no autograd
    assert core.backend_report().calls == 1


def test_strict_refuses_what_would_run_as_traced() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="computes gradients"):
        compiled(Block(), strict=True)(torch.randn(4, 32))


def test_a_parameter_alone_needs_no_autograd() -> None:
    model = Block().eval()
    with torch.inference_mode():
        y = compiled(lambda x: model(x.to(model.one.weight.dtype)) + model.one.bias.to(torch.float32))(
            torch.randn(2, 32)
        )
    assert y.is_inference()
    assert only_graph().original == ""


@torch.no_grad()
def test_autocast_runs_as_traced() -> None:
    model, x = Block().eval(), torch.randn(4, 32)
    run = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(x), model(x))
    assert "autocast" in only_graph().original


@torch.no_grad()
def test_autocast_that_is_switched_off_changes_nothing() -> None:
    model, x = Block().eval(), torch.randn(4, 32)

    def careful(x: Tensor) -> Tensor:  # as diffusion models guard their norms
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            y: Tensor = model(x)
        return y

    def nested(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return careful(x) + model(x)

    run = compiled(careful)
    torch.testing.assert_close(run(x), model(x))
    assert (only_graph().original, only_graph().matched["lift_rms_norm"]) == ("", 1)
    with torch.autocast("cpu", torch.bfloat16):  # what is switched off matters here
        assert torch.equal(run(x), careful(x))
    assert torch.equal(compiled(nested)(x), nested(x))
    assert ["autocast" in graph.original for graph in core.backend_report().graphs] == [False, True, True]


@torch.no_grad()
def test_graph_breaks_are_named_and_counted() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x.relu()

    x = torch.randn(4)
    assert torch.equal(compiled(broken)(x), broken(x))
    report = core.backend_report()
    ((why, count),) = report.graph_breaks.items()
    assert (count, len(report.graphs)) == (1, 2)
    assert "test_backend.py" in why
    assert report.graphs[0].graph_break == why
    assert "from line" in report.graphs[1].name


@torch.no_grad()
@pytest.mark.parametrize("lowering", ["inline", pytest.param("inductor", marks=pytest.mark.slow)])
def test_writes_into_inputs_and_views_of_them_are_kept(lowering: str) -> None:
    def step(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        cache[1:3].add_(x)
        return cache.view(-1), cache.sum(0) * 2

    run = compiled(step, lowering=lowering)
    for _ in range(2):
        cache, x = torch.randn(4, 8), torch.randn(2, 8)
        other = cache.clone()
        flat, total = run(cache, x)
        expected = step(other, x)
        assert torch.equal(cache, other)
        torch.testing.assert_close(total, expected[1])
        flat[0] = 7.0
        assert cache[0, 0] == 7.0
    assert only_graph().calls == 2


@torch.no_grad()
@pytest.mark.parametrize("lowering", ["inline", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inputs_that_share_memory_run_as_traced(lowering: str) -> None:
    def step(one: Tensor, other: Tensor) -> Tensor:
        one.add_(1)
        return other * 2

    run = compiled(step, lowering=lowering)
    run(torch.zeros(4), torch.zeros(4))
    base = torch.zeros(5)
    assert torch.equal(run(base[:4], base[1:]), torch.tensor([2.0, 2.0, 2.0, 0.0]))
    assert sum(core.backend_report().originals.values()) == 1


@torch.no_grad()
@pytest.mark.parametrize("lowering", ["inline", pytest.param("inductor", marks=pytest.mark.slow)])
def test_arguments_that_the_model_refuses_get_its_own_error(lowering: str) -> None:
    """What a library says of a kernel that it called names neither the op nor the dtypes."""
    run = compiled(nn.Linear(4, 4).eval(), lowering=lowering)
    with pytest.raises(RuntimeError, match="same dtype"):
        run(torch.zeros(2, 4, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("lowering", ["inline", pytest.param("inductor", marks=pytest.mark.slow)])
def test_symbolic_sizes_and_numbers(lowering: str) -> None:
    model = Block().eval()
    run = torch.compile(model, backend="core", dynamic=True, options={"lowering": lowering})
    for rows in (3, 5, 3):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(run(x), model(x))
    graph = only_graph()  # one graph, though the rows change
    assert graph.matched["lift_rms_norm"] == 1  # the norm's eps is a number again
    assert (graph.calls, graph.num_shapes) == (3, 2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_growing_cache_stays_attention(dtype: torch.dtype) -> None:
    attend = nn.functional.scaled_dot_product_attention

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, torch.cat((k, q), -2), torch.cat((v, q), -2))

    def drawn(length: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (torch.randn(2, 3, size, 16, dtype=dtype) for size in (1, length, length))
        for cache in (k, v):
            torch._dynamo.mark_dynamic(cache, 2)
        return q, k, v

    run = compiled(step, device=acme())
    for length in (7, 9, 12):
        given = drawn(length)
        torch.testing.assert_close(run(*given), step(*given))
    graph = only_graph()
    assert (graph.matched["lift_attention"], graph.calls) == (1, 3)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_attention_written_out_is_lifted_where_every_size_is_a_symbol(dtype: torch.dtype) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q @ k.transpose(-1, -2)) * 0.25, -1) @ v

    run = torch.compile(attend, backend="core", dynamic=True, options={**INLINE, "strict": True, "device": acme()})
    for queries, keys in ((7, 7), (5, 9), (6, 8)):
        given = [torch.randn(2, 4, length, 16, dtype=dtype) for length in (queries, keys, keys)]
        torch.testing.assert_close(run(*given), attend(*given))
    graphs = core.backend_report().graphs  # of equal lengths, and of two
    assert [(graph.matched["lift_attention"], graph.calls) for graph in graphs] == [(1, 1), (1, 2)]


@torch.no_grad()
def test_numbers_that_change_get_rewrites_of_their_own() -> None:
    def scaled(x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    run = torch.compile(scaled, backend="core", dynamic=True, options=INLINE)
    x = torch.randn(4, 32)
    for eps in (0.5, 0.25, 0.5, 0.1, 0.2, 0.3, 0.4):
        assert torch.equal(run(x, eps), scaled(x, eps))
    assert any("floating numbers" in note for note in only_graph().notes)


@torch.no_grad()
def test_results_of_numbers_that_stay_arguments_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.dynamo.graph._MAX_NUMBERS", 0)

    def scaled(x: Tensor, scale: float) -> tuple[Tensor, float]:
        return x * scale, scale * 2

    run, x = torch.compile(scaled, backend="core", dynamic=True, options={"lowering": "inductor"}), torch.randn(4)
    for scale in (0.1, 0.2):
        found, doubled = run(x, scale)
        assert torch.equal(found, x * scale)
        assert doubled == scale * 2
    assert any("are computed with by lowering 'inline'" in note for note in only_graph().notes)


@torch.no_grad()
def test_more_shapes_than_allowed_share_one_callable() -> None:
    device = core.select_device("cpu")
    lowered: list[int] = []

    def counting(request: Any) -> Any:
        lowered.append(1)
        return device.lowerings.available["inline"](request)

    from dataclasses import replace

    lowerings = replace(device.lowerings, available={**device.lowerings.available, "own": counting})
    counted = replace(device, lowerings=lowerings)
    run = torch.compile(
        Block().eval(),
        backend="core",
        dynamic=True,
        options={"device": counted, "lowering": "own", "max_shapes": 2},
    )
    for rows in (2, 3, 4, 5, 6):
        run(torch.randn(rows, 32))
    assert len(lowered) == 2
    assert any("more than 2 shapes" in note for note in only_graph().notes)


@torch.no_grad()
def test_weights_may_change_between_calls() -> None:
    model, x = Block().eval(), torch.randn(4, 32)
    run = compiled(model, enable_passes=("merge_linears",))
    assert torch.allclose(run(x), model(x), atol=1e-6)
    assert only_graph().matched["merge_linears"] == 1
    model.one.weight.mul_(2)
    model.other.weight.data.copy_(torch.randn(32, 32))
    assert torch.allclose(run(x), model(x), atol=1e-5)
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()}, assign=True)
    assert torch.allclose(run(x), model(x), atol=1e-4)
    assert core.backend_report().calls == 3


@torch.no_grad()
def test_two_models_of_one_class_keep_their_weights() -> None:
    torch.manual_seed(0)
    models, x = [Block().eval(), Block().eval()], torch.randn(4, 32)
    runs = [compiled(model, enable_passes=("merge_linears",)) for model in models]
    for _ in range(2):
        for model, run in zip(models, runs, strict=True):
            assert torch.allclose(run(x), model(x), atol=1e-6)


@torch.no_grad()
def test_shapes_are_captured_where_the_device_has_graphs() -> None:
    model, x = Block().eval(), torch.randn(4, 32)
    run = torch.compile(model, backend="core", options={"device": acme()})
    first = run(x)
    kept = first.clone()
    other = run(2 + x)
    assert torch.equal(first, kept)  # a later replay leaves earlier results alone
    torch.testing.assert_close(first, model(x))
    torch.testing.assert_close(other, model(2 + x))
    assert (only_graph().num_captured, only_graph().calls) == (1, 2)
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()}, assign=True)
    torch.testing.assert_close(run(x), model(x), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_captured_graph_keeps_state() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))
            self.total: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return self.total * 1.5

    model = Counting()
    run = torch.compile(model, backend="core", options={"device": acme()})
    for count in (1, 2, 3):
        assert torch.equal(run(torch.ones(4)), torch.full((4,), 1.5 * count))
    assert only_graph().num_captured == 1


@torch.no_grad()
def test_a_graph_that_writes_its_inputs_is_not_captured() -> None:
    run = torch.compile(lambda x: x.add_(1) * 2, backend="core", options={"device": acme()})
    x = torch.zeros(4)
    run(x)
    assert torch.equal(run(x), torch.full((4,), 4.0))
    assert only_graph().num_captured == 0
    assert any("not captured: it writes into" in note for note in only_graph().notes)


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"options": {"lowring": "inline"}}, "did you mean 'lowering'"),
        ({"options": {"verify": "yes"}}, "no level of that name"),
        ({"options": {"passes": "lift_rms_norm"}}, "pass a tuple"),
        ({"options": {"strict": "yes"}}, "give bool"),
        ({"options": {"max_shapes": 0}}, "give at least 1"),
        ({"options": {"device": 0}}, "give str or Device or device"),
        ({"options": {"passes": ("lift_norm",)}}, "lift_norm"),
        ({"options": {"device": "nowhere"}}, "no installed plugin"),
        ({"options": {"lowering": "nothing"}}, "this device has"),
        ({"mode": "reduce-overhead"}, "has no graphs"),
        ({"mode": "max-autotune"}, "settings of Inductor"),
    ],
)
def test_what_is_refused_says_why(given: dict[str, Any], told: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=told):
        torch.compile(Block().eval(), backend="core", **given)(torch.randn(4, 32))


@torch.no_grad()
def test_the_default_mode_is_no_mode() -> None:
    torch.compile(Block().eval(), backend="core", mode="default", fullgraph=True, disable=True)(torch.randn(4, 32))
    assert core.backend_report().graphs == ()
