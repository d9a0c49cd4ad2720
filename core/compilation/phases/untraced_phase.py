"""A phase whose callable is captured with no trace: break points found or set, and replays proven on further inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.common.graphs.indexing import checked_indices
from core.compilation.capture.breaks import blamed_module, breaks_at, modules_of
from core.compilation.capture.plain_call import ObservedCropper, UntracedCall
from core.compilation.phases.phase import Runnable
from core.compilation.phases.python_state import StateWatch
from core.errors import CaptureError, CoreError, GraphResourcesError, one_line

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.compilation.cache.reports import CachedGraph
    from core.compilation.phases.phase import Captured, Record, Stages
    from core.device import Mode

MAX_FOUND = 16
"""Most break points that are found by trial; for a model that needs more, set them by hand."""
NUM_CHECKS = 2
"""Number of random input sets if no examples are given."""
_EAGER = "options=core.CompileOptions(eager={})"


class UntracedPhase:
    """A `Phase` whose callable is captured as it is, each key by itself; in mode "off" there is nothing to capture."""

    graphs: Sequence[CachedGraph] = ()

    def __init__(self, name: str, mode: Mode, stages: Stages) -> None:
        self.name = name
        self.mode = mode
        self._stages = stages
        self._request = stages.request
        self._options = stages.request.options
        self._model = stages.request.models[name]
        self._cropper = ObservedCropper(self._request.table, self._request.inputs, self._options.outputs)
        self._watch = StateWatch(self._model)
        self._found: list[str] = list(self._options.eager or ())

    def prepare(self) -> tuple[GraphKey, ...]:
        """Return all keys of the phase; none where it runs eagerly."""
        return () if self.mode == "off" else self._request.table.phases[self.name]

    def begin(self, key: GraphKey) -> None:
        """Begin nothing: no graph is lowered."""

    def abandon(self) -> None:
        """End nothing."""

    def runnable(self, key: GraphKey) -> Runnable:
        """Bind the phase's callable to the static inputs and guards of a key."""
        views, padded = self._stages.buffers.views(key), bool(self._request.table.dims)
        writable, first = self._request.bound, self._watch.run
        call = UntracedCall(self._model, views, dict(key.guards), writable=writable, padded=padded, first=first)
        modules = modules_of(self._model).values()
        # Aliases keep the memory that a captured graph reads, whatever the modules' tensors come to point at later.
        held = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]

        def output() -> Any:
            assert call.output is not None  # read only after the capture has run the callable
            return call.output

        values = (*views.values(), *(tensor.detach() for tensor in held if tensor is not None))
        return Runnable(run=call, values=values, lower_s=0.0, output=output, cropper=self._cropper)

    def capture(self, key: GraphKey, record: Record) -> Captured:
        """Capture a key with the phase's break points; without any set, add modules that can't be captured and go on.

        Raises `CaptureError` naming the module to run eagerly.
        """
        modules = modules_of(self._model)
        while True:
            try:
                with breaks_at(modules, self._found):
                    outputs, cost = record(in_parts=self.mode == "segmented")
                break
            except GraphResourcesError:
                raise  # no module caused it
            except CaptureError as error:
                self._break_further(error, modules)
        self._cropper.observe(key, outputs)
        return outputs, cost

    def _break_further(self, error: CaptureError, modules: Mapping[str, nn.Module]) -> None:
        """Make a break point of what could not be captured; raise the error where there can be none."""
        further = _alike(blamed_module(error.__cause__ or error, modules), modules)
        if not further:
            raise error
        if set(further) <= set(self._found):
            around = ", ".join(further)
            error.remedy = f"take a module around {around} as the break point: {_EAGER.format('(its path,)')}"
            raise error
        if self._options.eager is not None or self._options.strict or len(self._found) >= MAX_FOUND:
            error.remedy = f"run it eagerly between the graphs: {_EAGER.format((*self._found, *further))}"
            raise error
        self._found += further
        names, reason = ", ".join(further), one_line(error.found)
        self._stages.account.note(
            f"{self.name}: {names} runs eagerly between graphs, as it can't be captured: {reason}"
        )

    def check(self, key: GraphKey, runnable: Runnable) -> None:
        """Compare replays with runs without graphs on further inputs; raise `CaptureError` if they differ in a bit.

        Control flow that depends on data, outside the break points, was frozen at capture. The check finds it as far as
        the inputs take another way.
        """
        host_arguments = self._stages.runner.host_arguments(key)
        if host_arguments:  # only the caller knows their values for other inputs
            names = ", ".join(sorted(host_arguments))
            self._unchecked(f"{names} come from the host", "compare a few replays yourself")
            return
        views = self._stages.buffers.views(key)
        sets = self._further_inputs(key, views)
        if not sets:
            why = "which integers are valid is not for core to guess"
            self._unchecked(why, f"give input sets: options=core.CompileOptions(examples={{{self.name!r}: [inputs]}})")
            return
        try:
            self._compare(key, runnable, views, sets)
        finally:
            for name, spec in self._request.inputs.items():
                if spec.padding != "bound":
                    views[name].fill_(spec.value if spec.padding == "sentinel" else 0)
            if self._options.reset is not None:
                self._options.reset()

    @checked_indices()  # what was frozen may be a length: what runs between graphs then reads beyond an end
    def _compare(
        self, key: GraphKey, runnable: Runnable, views: Mapping[str, Tensor], sets: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Run the input sets one after the other, state moving on between them, without graphs and by replays."""

        def outputs(run: Callable[[], tuple[Tensor, ...]]) -> list[Tensor]:
            if self._options.reset is not None:
                self._options.reset()
            found = []
            for values in sets:
                for name, value in values.items():
                    views[name].copy_(value)
                found += [tensor.clone() for tensor in run()]
            return found

        first, second = outputs(runnable.run), outputs(runnable.run)
        if not _equal(first, second):
            why = "two runs without graphs differ: it keeps state, or draws by chance"
            self._unchecked(why, "give `reset`, which brings state in place back to where it was")
            return
        try:
            differs = not _equal(first, outputs(lambda: self._stages.runner.replay(key)))
        except CoreError:
            raise
        except Exception as error:  # code between the graphs, which is not ours
            raise self._frozen(
                key, f"its replay fails ({one_line(str(error))}) where a run without graphs does not"
            ) from error
        if differs:
            raise self._frozen(key, "its replay differs from a run without graphs")

    def _frozen(self, key: GraphKey, how: str) -> CaptureError:
        return CaptureError(
            f"checking {key} on further inputs",
            found=f"{how}: what Python decided at capture was frozen",
            remedy=f"take the module that decides by data as a break point: {_EAGER.format('(its path,)')}; "
            "or mode 'off'",
        )

    def _unchecked(self, why: str, remedy: str) -> None:
        """Say that frozen Python would go unnoticed in the phase; raise `CaptureError` where strict."""
        if self._options.strict:
            raise CaptureError(f"checking {self.name} on further inputs", found=why, remedy=remedy)
        self._stages.account.note(f"{self.name}: not checked on further inputs: {why}; {remedy}")

    def _further_inputs(self, key: GraphKey, views: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """Return input sets of a bucket's shapes: the phase's examples that fit, else numbers where any will do."""
        inputs, sizes = self._request.inputs, self._request.table.sizes(key)
        found: list[Mapping[str, Tensor]] = []
        for example in self._request.examples.get(self.name, ()):
            real: dict[str, int] = {}
            for name, tensor in example.items():
                inputs[name].measure(name, tensor.shape, real)
            if all(size <= sizes[dim] for dim, size in real.items()):
                found.append({n: s.padded(example[n], sizes) for n, s in inputs.items() if s.padding != "bound"})
        if found:
            return found
        floating = {n: v for n, v in views.items() if v.is_floating_point() and inputs[n].padding != "bound"}
        generator = torch.Generator().manual_seed(0)
        # core can't guess which integers are valid (tokens, positions, lengths), so these inputs keep their zeros.
        return [
            {name: torch.randn(view.shape, generator=generator).to(view) for name, view in floating.items()}
            for _ in range(NUM_CHECKS if floating else 0)
        ]


def _alike(path: str, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return patterns for a module and its counterparts in other layers, which can't be captured either."""
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
