"""`CompileRequest`: everything a program is made from, checked once and passed whole to every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from core.compilation.arguments import (
    check_bound,
    check_callable,
    check_ops,
    check_outputs,
    check_phases,
    check_placement,
    check_providers,
    check_signature,
    examples_per_phase,
    models_per_phase,
)
from core.compilation.capture.inputs import Buckets, BucketTable, InputSpec
from core.compilation.oversized import split_dimensions
from core.compilation.rewrite.batch_invariant import check_lowering
from core.compilation.training import check_training_mode

if TYPE_CHECKING:
    from torch import Tensor

    from core.compilation.options import CompileOptions, Examples
    from core.device import Device, Mode

Model = Callable[..., Any]
Models = Model | Mapping[str, Model]
TRACED_MODES: tuple[Mode, ...] = ("full", "piecewise", "compile")
"""The modes that run a trace of the model, unless it is captured as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileRequest:
    """Everything a program is made from."""

    #: The callable of each phase.
    models: Mapping[str, Model]
    device: Device
    inputs: Mapping[str, InputSpec]
    table: BucketTable
    #: As given; `bound` and `examples` here are the checked forms of the options of these names.
    options: CompileOptions
    #: The modes that may serve each phase, best first.
    candidates: Mapping[str, tuple[Mode, ...]]
    #: The tensors of the inputs declared "bound".
    bound: Mapping[str, Tensor]
    #: Sets of inputs by phase.
    examples: Examples
    #: False where the callables are captured as they are.
    traced: bool = True

    @classmethod
    def of(
        cls,
        model: Models,
        device: Device,
        inputs: Mapping[str, InputSpec],
        buckets: Buckets | None,
        options: CompileOptions,
        *,
        traced: bool = True,
    ) -> CompileRequest:
        """Check the caller's arguments and normalise them; raise `UsageError` for impossible ones."""
        options = options.settled
        phases = next((tuple(each) for each in (model, options.mode) if isinstance(each, Mapping)), ())
        table = BucketTable.build(inputs, buckets, options.guards, phases=phases)
        models = models_per_phase(model, table)
        for phase, each in models.items():
            check_signature(each, inputs, table.guards[phase])
            check_training_mode(each)
            check_placement(each, device)
        check_phases(options.mode, table)
        if options.oversized == "split":
            split_dimensions(table, inputs)
        bound = check_bound(options.bound, inputs)
        check_outputs(options.outputs, table.dims)
        check_callable("reset", options.reset)
        check_callable("relocate", options.relocate)
        check_callable("progress", options.progress)
        candidates = {phase: options.modes_of(phase, device.capabilities.modes) for phase in table.phases}
        if options.deterministic is not None:
            first = [modes[0] for modes in candidates.values()] if traced else ["off"]
            lowering = check_lowering(options.lowering, options.providers or {}, device, first)
            options = replace(options, lowering=lowering)
        device.lowerings.resolve(options.lowering)
        check_ops(device)
        check_providers(options, device)
        if options.shared is not None:
            options.shared.check(table.phases)
        if options.shared_guard is not None:
            options.shared_guard.check(table.guards)
        return cls(
            models=models,
            device=device,
            inputs=inputs,
            table=table,
            options=options,
            candidates=candidates,
            bound=bound,
            examples=examples_per_phase(options, inputs, {phase: modes[0] for phase, modes in candidates.items()}),
            traced=traced,
        )

    @property
    def preferred(self) -> dict[str, Mode]:
        """The first choice of each phase."""
        return {phase: modes[0] for phase, modes in self.candidates.items()}

    def runs_trace(self, mode: Mode) -> bool:
        """Tell whether a phase in this mode runs a trace of its callable."""
        return self.traced and mode in TRACED_MODES
