"""core/explain/layer_errors.py: the errors of quantised layers in the terminal, on the page and in the document."""

from __future__ import annotations

import re

from core.explain.explanation import Explanation
from core.explain.html import to_html
from core.explain.layer_errors import layer_errors
from core.explain.text import to_text
from core.quantization.report import LayerReport, QuantizationReport

BAD = "model.layers.3.mlp.down_proj"


def layer(name: str, error: float | None, divergence: float | None = None) -> LayerReport:
    sizes = {"shape": (64, 32), "bytes_before": 8192, "bytes_after": 2304}
    return LayerReport(
        name=name, kind="Linear", scheme="int8", weight_error=error, output_error=error, divergence=divergence, **sizes
    )


def explanation(*layers: LayerReport, divergence: float | None = None) -> Explanation:
    return Explanation(
        device="cpu",
        product="a processor",
        plugin="core 0",
        versions={},
        switches="all passes",
        left_out=(),
        phases=(),
        model={"model": "a model"},
        quantization=QuantizationReport(scheme="int8", layers=layers, divergence=divergence),
    )


def sixteen(bad: float) -> list[LayerReport]:
    names = [f"model.layers.{index}.mlp.down_proj" for index in range(16)]
    return [layer(name, bad if name == BAD else 0.01 + 0.0001 * at) for at, name in enumerate(names)]


def test_a_layer_unlike_the_others_comes_first_and_is_marked() -> None:
    text = to_text(explanation(*sixteen(0.2)))
    first = next(line for line in text.splitlines() if "down_proj" in line)
    assert re.match(rf" {BAD} +64x32 +20\.000% \(18\.4x\) +20\.000%", first)
    assert text.count("x)") == 2 and "4 more layers" in text and "cumulative" not in text and "KL" not in text


def test_full_shows_all_layers_in_the_order_of_the_model() -> None:
    text = to_text(explanation(*sixteen(0.2)), full=True)
    assert re.findall(r"layers\.(\d+)\.", text) == [str(index) for index in range(16)] and "more layers" not in text


def test_the_page_and_the_document_have_all_layers() -> None:
    found = explanation(*sixteen(0.2), divergence=0.25)
    page = to_html(found)
    assert page.count("<tr><td>model.layers.") == 16
    (bad,) = re.findall(r'<tr><td>([^<]*)</td>(?:(?!</tr>).)*class="r bad"', page)
    assert bad == BAD
    document = found.to_json()["quantization"]
    assert [each["name"] for each in document["layers"]].index(BAD) == 3 and document["divergence"] == 0.25
    assert "all layers together: KL 0.25" in to_text(found)


def test_layers_that_were_not_measured_are_told_as_such() -> None:
    assert "not measured, quantised here" in to_text(explanation(layer("a", None), layer("b", None)))
    assert "errors of quantised" not in to_html(explanation(layer("a", None))).lower()
    (_, row) = layer_errors(QuantizationReport(scheme="x", layers=(layer("a", None), layer("b", 0.1)))).rows
    assert row[1]["output_error"] is not None
    assert re.search(r"^ a +64x32 +- +-$", to_text(explanation(layer("a", None), layer("b", 0.1))), re.M)


def test_errors_of_nothing_but_zeros_do_not_divide_by_zero() -> None:
    exact = [layer(name, 0.0) for name in "abc"]
    assert "x)" not in to_text(explanation(*exact)).replace("64x32", "")
    text = to_text(explanation(*exact, layer("d", 0.1)))
    assert "10.000% (infx)" in text
