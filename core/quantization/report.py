"""The report of quantising a model, layer by layer: sizes and errors, as data, text and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from core.quantization.targets import Ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One quantised layer; errors are None where they were not measured (no inputs given, or a checkpoint's codes)."""

    #: Its path in the model.
    name: str
    #: Class of the layer that was quantised.
    kind: str
    scheme: str
    #: Shape of its weight; stacked experts come first.
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    #: rms of the weight's error over rms of the weight.
    weight_error: float | None = None
    #: rms of the output's error over rms of the output, for the layer's inputs in the unquantised model.
    output_error: float | None = None
    #: The same in the model with all layers quantised, whose inputs hold the errors of the layers before.
    cumulative_error: float | None = None
    #: Mean KL divergence, in nats, of the model's predictions with this layer alone quantised from the exact model's.
    divergence: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """All quantised layers of a model in its order, and those left out."""

    #: The name of the scheme; several, separated by commas, if layers differ.
    scheme: str
    layers: tuple[LayerReport, ...]
    ignored: tuple[Ignored, ...] = ()
    #: Where the codes came from.
    source: str = "quantised here"
    #: Mean KL divergence, in nats, of the model's predictions with all layers quantised from the exact model's.
    divergence: float | None = None

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the layers' parameters before and after."""
        return sum(layer.bytes_before for layer in self.layers), sum(layer.bytes_after for layer in self.layers)

    def worst(self, count: int = 3) -> tuple[LayerReport, ...]:
        """Return the layers with the largest output error, weight error where outputs were not measured."""

        def error(layer: LayerReport) -> float:
            return layer.output_error if layer.output_error is not None else layer.weight_error or 0.0

        return tuple(sorted(self.layers, key=error, reverse=True)[:count])

    def summary(self) -> str:
        """Return one line: scheme, layers, size, worst errors."""
        before, after = self.num_bytes
        line = f"{self.scheme}, {len(self.layers)} layers ({self.source})"
        line += f", their parameters {before / 2**20:.1f} -> {after / 2**20:.1f} MiB"
        measured = [layer for layer in self.worst(1) if layer.weight_error is not None]
        for layer in measured:
            kind = "weights" if layer.output_error is None else "output"
            error = layer.weight_error if layer.output_error is None else layer.output_error
            line += f"; largest relative error of {kind} {error:.2%} in {layer.name}"
        return line

    def text(self) -> str:
        """Return a table, one line for each layer, and the layers left out."""
        width = max((len(layer.name) for layer in self.layers), default=5)
        lines = [self.summary(), f"{'layer':{width}}  {'shape':>18}  {'weight error':>12}  {'output error':>12}"]
        for layer in self.layers:
            errors = [f"{e:.3%}" if e is not None else "-" for e in (layer.weight_error, layer.output_error)]
            shape = "x".join(map(str, layer.shape))
            lines.append(f"{layer.name:{width}}  {shape:>18}  {errors[0]:>12}  {errors[1]:>12}")
        return "\n".join([*lines, *(f"left out: {each.name}: {each.reason}" for each in self.ignored)])

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        before, after = self.num_bytes
        return {
            "scheme": self.scheme,
            "source": self.source,
            "bytes_before": before,
            "bytes_after": after,
            "divergence": self.divergence,
            "layers": [{**asdict(layer), "shape": list(layer.shape)} for layer in self.layers],
            "ignored": [asdict(each) for each in self.ignored],
        }


def report_of(model: Any) -> QuantizationReport | None:
    """Return the report of a model that was quantised or loaded quantised, None for any other."""
    report = getattr(model, "quantization", None)
    return report if isinstance(report, QuantizationReport) else None
