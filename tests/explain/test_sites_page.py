"""The page of `core explain`: each site before and after its pass, and the lines of the model's code."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from core.compilation.rewrite.order import PassSwitches
from core.compilation.trace.tracing import trace
from core.engine.check.graphs import PhaseGraph
from core.explain.excerpts import Excerpts
from core.explain.explanation import Explanation, explain
from core.explain.html import to_html
from core.explain.nodes import NodeRecord
from core.host.selection import select_device
from tests.browser import BROWSER, measured
from tests.common.passes.graphs import Stack
from tests.page import Page

NORMS = PassSwitches(only=("lift_rms_norm", "fuse_add_rms_norm"))
HOSTILE = "</script><img src=x onerror=alert(1)>"
MODEL = f"""
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        y = self.up(x)  # {HOSTILE}
        return nn.functional.silu(y) * y
"""


def explained(model: nn.Module, switches: PassSwitches) -> Explanation:
    inputs = {"x": torch.ones(3, 16)}
    traced = trace(lambda x: model(x), inputs)
    graph = PhaseGraph(phase="decode", traced=traced, examples=(inputs,))
    return explain([graph], select_device("cpu"), switches=switches, model={"model": type(model).__name__})


@pytest.fixture(scope="module")
def stack() -> Explanation:
    return explained(Stack(3), NORMS)


def own_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return a module whose code is in a file of its own."""
    file = folder / "own_model.py"
    file.write_text(MODEL, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_model", module)
    spec.loader.exec_module(module)
    model: nn.Module = module.Gated()
    return model


def node(file: Path, lineno: int) -> NodeRecord:
    return NodeRecord(
        name="n", label="n", op="mul", text="", value="", path="", source="", file=str(file), lineno=lineno
    )


def test_a_site_holds_the_nodes_as_they_stood_at_its_pass(stack: Explanation) -> None:
    stage = stack.phases[0].stages[0]
    for change in stage.changes:
        assert sorted(each.name for each in change.before) == sorted(change.removed)
        assert sorted(each.name for each in change.after) == sorted(change.made)
    fused = next(change for change in stage.changes if change.pass_name == "fuse_add_rms_norm")
    # The norm that the pass before had made is in neither of the whole graphs.
    (norm,) = (each for each in fused.before if each.op == "core::rms_norm")
    assert norm.name not in {each.name for each in (*stage.before, *stage.after)}
    assert "layers.0.post_layernorm.weight, 1e-05" in norm.text
    assert [each.op for each in fused.after if each.op.startswith("core::")] == ["core::add_rms_norm"]


def test_the_document_has_the_nodes_of_sites_where_graphs_are_asked_for(stack: Explanation) -> None:
    with_nodes, without = (stack.to_json(nodes=nodes)["phases"][0]["stages"][0]["changes"] for nodes in (True, False))
    assert all(each["before"] and each["before"][0]["lineno"] > 0 for each in with_nodes)
    assert all(each["before"] is None and each["after"] is None and each["removed"] for each in without)


def test_each_site_of_the_page_shows_both_sides_and_opens_the_lines_of_the_code(stack: Explanation) -> None:
    text = to_html(stack)
    page = Page(text)
    changes = stack.phases[0].stages[0].changes
    assert {f"p0c{change.index}" for change in changes} <= page.ids & page.places
    assert text.count('class="node ') == sum(len(change.before) + len(change.after) for change in changes)
    panel = text.partition('id="p0c0"')[2].partition("</details>")[0]
    (name,) = re.findall(r'class="source" href="#(e\d+)"', panel)
    excerpt = text.partition(f'id="{name}"')[2].partition("</details>")[0]
    assert re.search(r'class="hit">\s*\d+\s+normed = wide \* torch.rsqrt', excerpt)
    assert "graphs.py</a>" in excerpt and {path.rpartition("/")[2] for path in page.files} == {"graphs.py"}


def test_the_line_is_that_of_the_models_own_code_and_nothing_in_it_is_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = explained(own_model(tmp_path, monkeypatch), PassSwitches(only=("lift_linear",)))
    linear = next(each for each in explanation.phases[0].stages[0].before if each.op == "linear")
    assert (Path(linear.file).name, linear.lineno) == (
        "own_model.py",
        MODEL[: MODEL.index("y = self.up")].count("\n") + 1,
    )
    text = to_html(explanation)
    assert HOSTILE not in text and "own_model.py" in text
    assert HOSTILE in "".join(Page(text).texts)


def test_lines_far_apart_have_excerpts_of_their_own_and_equal_ones_are_one(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("".join(f"line{number} = {number}\n" for number in range(1, 41)), encoding="utf-8")
    excerpts = Excerpts()
    found = excerpts.of([node(file, number) for number in (30, 2, 4)])
    assert [each.title for each in found] == ["long.py:2-4", "long.py:30"]
    assert [number for number, _, marked in found[0].lines if marked] == [2, 4]
    assert [number for number, *_ in found[1].lines] == list(range(27, 34))
    assert excerpts.of([node(file, 4), node(file, 2)]) == found[:1] and len(excerpts.listed()) == 2


@pytest.mark.parametrize("lineno", [0, 3])
def test_code_that_is_not_there_has_no_excerpt(tmp_path: Path, lineno: int) -> None:
    file = tmp_path / "short.py"
    file.write_text("one = 1\n", encoding="utf-8")
    excerpts = Excerpts()
    assert excerpts.of([node(file, lineno), node(tmp_path / "gone.py", 1), node(Path("<string>"), 1)]) == []
    assert excerpts.listed() == [] and excerpts.id_of(node(file, lineno)) == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(BROWSER) is None, reason=f"needs {BROWSER}")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_opens_the_line_of_a_site_and_no_column_is_cut(
    stack: Explanation, width: int, tmp_path: Path
) -> None:
    opened = """
    for (const box of document.querySelectorAll("details")) box.open = true;
    const site = document.querySelector(".site"), link = site.querySelector("a.source");
    link.click();
    const shown = site.querySelector(".code .hit").textContent;
    link.click();
    return {shown, hidden: site.querySelector(".code") === null};
    """
    found = measured(to_html(stack), width, opened, tmp_path)
    assert found["width"] == width and found["cut"] == [] and found["overflow"] <= 0
    assert "rsqrt" in found["shown"] or "wide" in found["shown"]
    assert found["hidden"] is True
