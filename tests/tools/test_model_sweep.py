"""tools/model_sweep: what becomes of a class, in one word and in the page's tables; and one class examined."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
Import = Callable[[str], Any]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Import:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def result(name: str, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"graphs": 1, "breaks": {}, "originals": {}, "undone": [], "passed": True, "reason": ""}
    facts |= {"lifted": {"attention": [2, 2], "layer_norm": [3, 4]}, "ratio": 0.5, "class": "ToyModel"}
    return {"type": name, "family": "text", "stage": "done", **facts, **changes}


RESULTS = (
    (result("plain"), "right"),
    (result("broken", graphs=3, breaks={"a print (model.py:3)": 2}), "right"),
    (result("traced", originals={"a size depends on values": 2}), "partly"),
    (result("undone", undone=["lift_linear: off"]), "partly"),
    (result("wrong", passed=False, reason="output 0: error over bound"), "WRONG"),
    (result("unjudged", passed=None, reason="eager itself is 0.1 away from fp64"), "not judged"),
    (result("python", graphs=0), "no graph"),
    ({"type": "raises", "family": "text", "stage": "compile", "error": "KeyError: 'x'"}, "fails"),
    ({"type": "missing", "family": "vision", "stage": "build", "error": "ImportError: timm"}, "not run"),
)


def test_each_outcome_has_a_word(scripts: Import) -> None:
    report = scripts("model_sweep.report")
    assert [report.outcome(each) for each, _ in RESULTS] == [word for _, word in RESULTS]
    assert "3 graphs, 2 breaks" in report.describe(RESULTS[1][0])
    assert "graph break, 2 times: a print (model.py:3)" in report.describe(RESULTS[1][0])


def test_the_page_counts_by_family_and_kind_and_gives_reasons(scripts: Import) -> None:
    page = scripts("model_sweep.report").page([each for each, _ in RESULTS], ("text", "vision"), 12)
    assert "; 9 of 12 classes were tried so far." in page
    assert "| text | 8 | 8 | 2 | 25.0 % | 5 | 83.3 % |" in page
    assert "| vision | 1 | 0 | 0 |  | 0 |  |" in page
    assert "| all | 9 | 8 | 2 | 25.0 % | 5 | 83.3 % |" in page
    assert "| layer_norm | 21 | 28 | 75.0 % |" in page
    assert "- `raises`: compile: KeyError: 'x'" in page
    assert "- `plain`" not in page


def test_a_graph_of_a_part_stands_for_all_parts_alike(scripts: Import) -> None:
    """Dynamo begins a graph in a part of a model after a break, and runs it for each part that looks the same."""
    import torch
    from torch import fx

    import core.common.ops.canonical  # noqa: F401  # declares the ops

    site = scripts("lift_coverage.oracle").Site
    sites = [site("layer_norm", f"encoder.layers.{index}.norm", "LayerNorm") for index in (0, 1)]
    sites += [site("layer_norm", "decoder.norm", "LayerNorm"), site("attention", "encoder.layers.0.attn", "Attention")]
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.core.layer_norm.default, (x, None, None, 1e-5))
    graph.output(node)

    def left(path: str) -> list[str]:
        node.meta["nn_module_stack"] = {"here": (path, torch.nn.LayerNorm)}
        found = scripts("model_sweep.measure").missed(sites, fx.GraphModule({}, graph))
        return [f"{each.kind} {each.path}" for each in found]

    assert left("L['self'].norm") == ["attention encoder.layers.0.attn"]
    assert left("L['self'].layers.1.norm") == [
        "layer_norm encoder.layers.0.norm",
        "layer_norm decoder.norm",
        "attention encoder.layers.0.attn",
    ]
    assert left("L['self'].encoder.layers.0.norm")[0] == "layer_norm encoder.layers.1.norm"


def test_every_family_has_classes_and_no_type_twice(scripts: Import) -> None:
    pytest.importorskip("transformers")
    families = scripts("model_sweep.families")
    for name in families.FAMILIES:
        found = families.classes(name)
        assert found
        assert all(isinstance(each, str) and each for each in found.values())


def test_sites_are_counted_before_ops_are_put_back_for_aten(scripts: Import) -> None:
    """A product of heads by one weight is for a pass on ATen ops, before which the processor gets its norms back."""
    import torch
    from torch import nn

    measure = scripts("model_sweep.measure")

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.randn(8, 4, 4)), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.einsum("td,dnh->tnh", x, self.weight))

    model, inputs = Attention().eval(), {"x": torch.randn(6, 8)}
    sites = measure.find_sites(model, lambda **given: model(**given), inputs)
    _, report, lifted = measure._compiled(model, inputs, sites)
    (graph,) = report.graphs
    assert any(each.stage == "aten" and each.matched for each in graph.passes), [each.name for each in graph.passes]
    assert lifted == {"layer_norm": [1, 1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "model_type"), [("text", "bert"), ("vision", "vit"), ("audio", "wav2vec2"), ("seq2seq", "t5")]
)
def test_a_class_is_right(scripts: Import, family: str, model_type: str) -> None:
    pytest.importorskip("transformers")
    found = scripts("model_sweep.measure").examine(family, model_type)
    assert scripts("model_sweep.report").outcome(found) == "right", found
    assert found["graphs"] == 1
    assert found["lifted"]["attention"][0] == found["lifted"]["attention"][1] > 0
