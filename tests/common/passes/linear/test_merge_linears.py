"""core/common/passes/linear/merge.py: projections of one input become one, weights stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS
from core.common.passes.linear.merge import MERGE_LINEARS
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.errors import PassError
from core.verify.execution import run_graph
from core.verify.verify import Verification, verify
from tests.common.passes.linear.merging import Attention, Decoder, Merged, Mlp, Pair, constants_of, plain, tokens
from tests.marks import slow_except

DTYPES = [torch.float32, torch.bfloat16]


def linears(merged: Merged) -> list[fx.Node]:
    return [n for n in merged.graph.module.graph.nodes if getattr(n.target, "__name__", "") == "linear"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kinds", ["---", "bbb", "b-b"])
def test_projections_of_one_input_become_one(kinds: str, dtype: torch.dtype) -> None:
    merged = Merged(Decoder(2, kinds=kinds, dtype=dtype), tokens(dtype))
    assert merged.report.matched == 4 and merged.report.near_misses == ()
    assert len(linears(merged)) == 2 * 4  # of 2 * 7
    assert merged.report.sites[:2] == ("layers.0.self_attn", "layers.0.mlp")
    widths = [tuple(tensor.shape) for _, tensor in merged.constants.added]
    biases = [(128,)] if "b" in kinds else []
    assert widths == [(128, 64), *biases, (256, 64)] * 2
    merged.check_numbers()


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verification_judges_every_merged_group(dtype: torch.dtype) -> None:
    graph, x = trace(Decoder(2, kinds="b-b", dtype=dtype), {"x": tokens(dtype)}), tokens(dtype)
    constants = constants_of(graph)
    found: list[Verification] = []

    def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
        found.append(verify(report, before, after, [graph.values({"x": x})], constants=constants))

    PassManager([MERGE_LINEARS], strict=True).run(graph.module, constants=constants, check=check)
    assert found[0].passed and found[0].unjudged == "" and found[0].num_values >= 1


def test_linears_are_not_moved_across_a_switch_of_modes() -> None:
    def function(pair: Pair, x: Tensor) -> Any:
        a = pair.a(x).sin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return a * pair.b(x).cos()

    graph = trace(Pair(function), {"x": tokens()})
    (report,) = PassManager([MERGE_LINEARS], strict=True).run(graph.module, constants=constants_of(graph))
    assert report.matched == 0
    assert "differs in: dtype of the result" in report.near_misses[0].reason


def test_fake_values_agree_with_what_the_merged_graph_computes() -> None:
    merged = Merged(Decoder(2, kinds="b-b"), tokens())

    class Compare(fx.Interpreter):
        num_slices = 0

        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            fake = n.meta.get("example_value")
            if isinstance(value, Tensor) and isinstance(fake, FakeTensor):
                assert (fake.shape, fake.stride(), fake.dtype) == (value.shape, value.stride(), value.dtype), n
                self.num_slices += not value.is_contiguous() and n.target == "view"
            return value

    interpreter = Compare(merged.graph.module)
    with torch.no_grad():
        interpreter.run(*merged.values())
    assert interpreter.num_slices == 6


def test_without_the_weights_it_is_skipped_with_the_reason() -> None:
    graph = trace(Decoder(1), {"x": tokens()})
    (report,) = PassManager([MERGE_LINEARS], strict=True).run(graph.module)
    assert report.matched == 0 and "weights" in report.skipped and "not given" in report.skipped


class Parallel(nn.Module):
    """Attention and MLP on one input: five projections, two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.self_attn(x) + self.mlp(x)
        return out


def test_modules_are_not_mixed_up() -> None:
    merged = Merged(Parallel().requires_grad_(False), tokens())
    assert merged.report.sites == ("self_attn", "mlp") and len(merged.constants.added) == 2
    merged.check_numbers()


class Wrapped(nn.Module):
    """A linear in a module of its own, as adapters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def test_linears_in_wrappers_belong_to_the_module_around_them() -> None:
    mlp = Mlp()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = Wrapped(), Wrapped(), nn.Linear(64, 64)  # type: ignore[assignment]
    merged = Merged(nn.Sequential(mlp).requires_grad_(False), tokens())
    assert merged.report.matched == 1
    merged.check_numbers()


def written_between(pair: Pair, x: Tensor) -> Any:
    rows = x * 2
    a = pair.a(rows).sin()
    rows.add_(1.0)
    return a * pair.b(rows).cos()


def computed_weight(pair: Pair, x: Tensor) -> Any:
    return pair.a(x).sin() * nn.functional.linear(x, pair.b.weight * 2)


def written_result(pair: Pair, x: Tensor) -> Any:
    a = pair.a(x)
    a.mul_(2.0)
    return a.sin() * pair.b(x)


def returned(pair: Pair, x: Tensor) -> tuple[Tensor, Tensor]:
    return pair.a(x).view(-1, 32), pair.b(x).sin()


def flattened(pair: Pair, x: Tensor) -> Any:
    return pair.a(x).view(-1).sin() * pair.b(x).view(-1)


def written_weight(pair: Pair, x: Tensor) -> Any:
    y = pair.a(x).sin() * pair.b(x)
    pair.b.weight.mul_(0.5)
    return y


def twice(pair: Pair, x: Tensor) -> Any:
    return pair.a(x).sin() * pair.a(x).cos()


UNFIT: dict[str, tuple[Callable[..., Any], str]] = {
    "the input is written in between": (written_between, "differs in: writes into the input"),
    "a weight is computed": (computed_weight, "is no constant"),
    "a result is written": (written_result, "its result is written later"),
    "a result is returned": (returned, "its result is returned"),
    "a result must be contiguous": (flattened, "can't compute on a slice"),
    "a weight is written": (written_weight, "is written by the graph"),
    "one weight": (twice, "is used twice"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", UNFIT)
def test_what_can_not_be_merged_is_left_alone_with_the_reason(case: str) -> None:
    function, reason = UNFIT[case]
    model = Pair(function)
    memory = model.a.weight.data_ptr(), model.b.weight.data_ptr()
    merged = Merged(model, tokens())
    assert merged.report.matched == 0 and merged.constants.added == ()
    assert any(reason in miss.reason for miss in merged.report.near_misses), merged.report.near_misses
    assert (model.a.weight.data_ptr(), model.b.weight.data_ptr()) == memory
    assert all(map(torch.equal, merged.run().outputs, merged.before.outputs))


def test_the_pair_itself_is_merged() -> None:
    merged = Merged(Pair(plain), tokens())
    assert merged.report.matched == 1 and merged.report.near_misses == ()
    merged.check_numbers()


def test_undoing_it_leaves_graph_and_model_right() -> None:
    model = Decoder(2, kinds="b-b")
    graph = trace(model, {"x": tokens()})
    values = graph.values({"x": tokens()})
    before, text = run_graph(graph.module, values), graph.module.code
    constants = constants_of(graph)

    def refuse(*_: object) -> None:
        raise PassError("verifying", found="a difference", remedy="none")

    (report,) = PassManager([MERGE_LINEARS]).run(graph.module, constants=constants, check=refuse)
    assert report.error and report.matched == 0
    assert constants.added == () and graph.module.code == text
    assert torch.equal(run_graph(graph.module, values).outputs[0], before.outputs[0])
    assert torch.equal(model(tokens()), before.outputs[0])
    # The weights lie in the joined tensors now; a second attempt finds them there.
    (report,) = PassManager([MERGE_LINEARS], strict=True).run(graph.module, constants=constants)
    assert report.matched == 4 and len(constants.added) == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_except(DTYPES, torch.bfloat16), ids=str)
def test_a_model_with_a_static_cache_keeps_its_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.engine.static.cache import static_phases

    model: Any = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=dtype).model
    memory: list[set[int]] = []
    for phase in static_phases(model):
        graph = trace(phase.function, phase.inputs)
        constants = constants_of(graph)
        before = run_graph(graph.module, graph.values(phase.inputs))
        manager = PassManager([REMOVE_NO_OPS, MERGE_LINEARS], strict=True)
        _, report = manager.run(graph.module, constants=constants)
        added = [tensor for _, tensor in constants.added]
        after = run_graph(graph.module, [*graph.values(phase.inputs), *added])
        assert report.matched == 2 * 2
        assert before.written.keys() == after.written.keys() and len(after.written) == 2 * 3
        bound = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
        for old, new in [
            *zip(before.outputs, after.outputs, strict=True),
            *zip(before.written.values(), after.written.values(), strict=True),
        ]:
            assert float((old.double() - new.double()).abs().max()) <= bound * max(1.0, float(old.abs().max()))
        memory.append({tensor.data_ptr() for tensor in added})
    assert memory[0] == memory[1]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
