"""Capturing callables with no trace: break points found or set, and replays proven on further inputs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.common.graphs.backend import GraphKey
from core.compilation.arguments import Examples
from core.compilation.capture.breaks import blamed_module, breaks_at, modules_of
from core.compilation.capture.buffers import StaticBuffers
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.capture.runner import CaptureCost, GraphRunner
from core.compilation.capture.untraced import ObservedCropper, OutputDims, UntracedCall
from core.compilation.phases.traced import Bound
from core.errors import CaptureError, GraphResourcesError, one_line

if TYPE_CHECKING:
    from core.compilation.options import CompileOptions

log = logging.getLogger("core.compilation.compile")
MAX_FOUND = 16
"""Break points that are found by trial; a model that needs more is better described by hand."""
NUM_CHECKS = 2
"""Input sets made up where no examples are given."""


class UntracedPhases:
    """Captures phases as they are, each key by itself; notes what it found for the report."""

    def __init__(
        self,
        options: CompileOptions,
        *,
        runner: GraphRunner,
        inputs: Mapping[str, InputSpec],
        table: BucketTable,
        buffers: StaticBuffers,
        examples: Examples,
        outputs: Sequence[OutputDims] | None,
        reset: Callable[[], None] | None,
    ) -> None:
        self._options = options
        self._runner = runner
        self._inputs = inputs
        self._table = table
        self._buffers = buffers
        self._examples = examples
        self._reset = reset
        self._cropper = ObservedCropper(table, inputs, outputs)
        self._found: dict[str, list[str]] = {}
        self.notes: list[str] = []

    def bind(self, key: GraphKey, model: Callable[..., Any]) -> Bound:
        """Bind a phase's model to the static inputs and guards of a key."""
        views = self._buffers.views(key)
        call = UntracedCall(model, views, dict(key.guards), writable=self._buffers.bound, padded=bool(self._table.dims))
        # Aliases keep the memory that a captured graph reads, whatever the modules' tensors come to point at later.
        held = [t for m in modules_of(model).values() for t in (*m._parameters.values(), *m._buffers.values())]

        def output() -> Any:
            assert call.output is not None  # asked after the capture has run it
            return call.output

        values = (*views.values(), *(tensor.detach() for tensor in held if tensor is not None))
        return Bound(run=call, values=values, lower_s=0.0, output=output, cropper=self._cropper)

    def capture(
        self,
        key: GraphKey,
        model: Callable[..., Any],
        capture: Callable[[], tuple[tuple[Tensor, ...], CaptureCost]],
    ) -> tuple[tuple[Tensor, ...], CaptureCost]:
        """Capture a key with the phase's break points; without any set, add modules that can't be captured and go on.

        Raises `CaptureError` naming the module to run eagerly, and where a replay differs from a run without graphs.
        """
        modules = modules_of(model)
        patterns = self._found.setdefault(key.phase, list(self._options.eager or ()))
        while True:
            try:
                with breaks_at(modules, patterns):
                    outputs, cost = capture()
                break
            except GraphResourcesError:
                raise  # no module is to blame
            except CaptureError as error:
                further = _alike(blamed_module(error.__cause__ or error, modules), modules)
                if not further:
                    raise
                if set(further) <= set(patterns):
                    error.remedy = f"take a module around {', '.join(further)} as the break point: eager=(its path,)"
                    raise
                if self._options.eager is not None or self._options.strict or len(patterns) >= MAX_FOUND:
                    error.remedy = f"run it eagerly between the graphs: eager={(*patterns, *further)!r}"
                    raise
                patterns += further
                names, reason = ", ".join(further), one_line(error.found)
                self.notes.append(
                    f"{key.phase}: {names} runs eagerly between graphs, as it can't be captured: {reason}"
                )
                log.warning(self.notes[-1])
        self._cropper.observe(key, outputs)
        return outputs, cost

    def check(self, key: GraphKey, bound: Bound) -> None:
        """Compare replays with runs without graphs on further inputs; raise `CaptureError` if they differ in a bit.

        Control flow that depends on data and is not in a break point was frozen at capture: this finds it, as far as
        the inputs take another way.
        """
        host_arguments = self._runner.host_arguments(key)
        if host_arguments:  # their values for other inputs are the caller's to know
            names = ", ".join(sorted(host_arguments))
            self._unchecked(key.phase, f"{names} come from the host", "compare a few replays yourself")
            return
        views = self._buffers.views(key)
        sets = self._further_inputs(key, views)
        if not sets:
            why = "which integers are valid is not for core to guess"
            self._unchecked(key.phase, why, f"give input sets: examples={{{key.phase!r}: [inputs]}}")
            return
        try:
            self._compare(key, bound, views, sets)
        finally:
            for name, spec in self._inputs.items():
                if spec.padding != "bound":
                    views[name].fill_(spec.value if spec.padding == "sentinel" else 0)
            if self._reset is not None:
                self._reset()

    def _compare(
        self, key: GraphKey, bound: Bound, views: Mapping[str, Tensor], sets: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Run the input sets one after the other, state moving on between them, without graphs and by replays."""

        def outputs(run: Callable[[], tuple[Tensor, ...]]) -> list[Tensor]:
            if self._reset is not None:
                self._reset()
            found = []
            for values in sets:
                for name, value in values.items():
                    views[name].copy_(value)
                found += [tensor.clone() for tensor in run()]
            return found

        first, second = outputs(bound.run), outputs(bound.run)
        if not _equal(first, second):
            why = "two runs without graphs differ: it keeps state, or draws by chance"
            self._unchecked(key.phase, why, "give `reset`, which brings state in place back to where it was")
        elif not _equal(first, outputs(lambda: self._runner.replay(key))):
            raise CaptureError(
                f"checking {key} on further inputs",
                found="its replay differs from a run without graphs: what Python decided at capture was frozen",
                remedy="take the module that decides by data as a break point: eager=[its path]; or mode 'off'",
            )

    def _unchecked(self, phase: str, why: str, remedy: str) -> None:
        """Say that frozen Python would go unnoticed in a phase; raise `CaptureError` where strict."""
        if self._options.strict:
            raise CaptureError(f"checking {phase} on further inputs", found=why, remedy=remedy)
        note = f"{phase}: not checked on further inputs: {why}; {remedy}"
        if note not in self.notes:
            self.notes.append(note)
            log.warning(note)

    def _further_inputs(self, key: GraphKey, views: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """Return input sets of a bucket's shapes: the phase's examples that fit, else numbers where any will do."""
        sizes = self._table.sizes(key)
        found: list[Mapping[str, Tensor]] = []
        for example in self._examples.get(key.phase, ()):
            real: dict[str, int] = {}
            for name, tensor in example.items():
                self._inputs[name].measure(name, tensor.shape, real)
            if all(size <= sizes[dim] for dim, size in real.items()):
                found.append({n: s.padded(example[n], sizes) for n, s in self._inputs.items() if s.padding != "bound"})
        if found:
            return found
        floating = {n: v for n, v in views.items() if v.is_floating_point() and self._inputs[n].padding != "bound"}
        generator = torch.Generator().manual_seed(0)
        # Which integers are valid (tokens, positions, lengths) is not for core to guess: they keep their zeros.
        return [
            {name: torch.randn(view.shape, generator=generator).to(view) for name, view in floating.items()}
            for _ in range(NUM_CHECKS if floating else 0)
        ]


def _alike(path: str, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return patterns for a module and those like it in other layers: what can't be captured there can't be here."""
    if not path:
        return ()
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
    matching = [other for other in modules if fnmatchcase(other, pattern)]
    same = [other for other in matching if type(modules[other]) is type(modules[path])]
    return (pattern,) if same == matching else tuple(same)


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b)
        and torch.equal(a != a, b != b)
        for a, b in zip(ours, theirs, strict=True)
    )
