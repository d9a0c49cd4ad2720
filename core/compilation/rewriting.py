"""Passes over a traced graph, before implementations are chosen: on Dynamo's ops and, if there are any, on ATen's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from core.common.passes.constants import Constants
from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Stage
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import implemented_ops, put_back_unimplemented
from core.compilation.options import Verify
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.run import Check
from core.compilation.rewrite.stages import later_stages
from core.compilation.trace.traced import ConstantSlot, TracedGraph
from core.device import Device

if TYPE_CHECKING:
    from torch import fx

    from core.compilation.rewrite.snapshot import Snapshot

__all__ = ["Rewriter", "Rewritten", "Watcher", "bound_constants", "device_passes"]


def device_passes(device: Device) -> tuple[Pass, ...]:
    """Return the passes that a graph for this device goes through unless told otherwise, not yet ordered.

    A pass of core that the device declares anew, its code and name the same, stands in for core's.
    """
    common = {each.name: each for each in COMMON_PASSES}
    anew = {each.name: each for each in device.passes if each.name in common and _is_anew(each, common[each.name])}
    own = (each for each in device.passes if anew.get(each.name) is not each)
    return (*(common | anew).values(), *own)


def _is_anew(declared: Pass, common: Pass) -> bool:
    """Tell whether a declaration differs from core's in what decides where its rewrite pays, not in the rewrite."""
    code = ("find", "run", "patterns", "mechanism", "stage")
    return all(getattr(declared, name) == getattr(common, name) for name in code)


def bound_constants(traced: TracedGraph) -> Constants:
    """Return the constants of the graph's placeholders, for passes to read and to extend."""
    names = (node.name for node in traced.module.graph.find_nodes(op="placeholder"))
    slots = zip(names, traced.slots, strict=True)
    values = {name: slot.value for name, slot in slots if isinstance(slot, ConstantSlot)}
    return Constants({name: value for name, value in values.items() if isinstance(value, Tensor)})


class Watcher(Protocol):
    """Is told what happens to a graph, stage by stage; changes nothing."""

    def begin(self, stage: Stage, traced: TracedGraph) -> None:
        """Hear that the passes of a stage are about to run on this graph."""

    def note(self, report: PassReport, before: Snapshot, after: fx.GraphModule) -> None:
        """Hear that a pass has changed the graph."""

    def end(self, stage: Stage, traced: TracedGraph, reports: tuple[PassReport, ...]) -> None:
        """Hear that the passes of a stage have run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A rewritten graph, before implementations of its canonical ops are chosen."""

    traced: TracedGraph
    passes: tuple[PassReport, ...]
    passes_s: float
    #: Seconds of turning it into ATen ops; 0.0 where no pass needs them.
    aten_s: float
    #: The constants whose content a pass may have read.
    contents: tuple[Tensor, ...] = ()
    #: The constants that passes added with unknown sources.
    sourceless: tuple[str, ...] = ()


class Rewriter:
    """Runs the chosen passes over each traced graph of a program."""

    def __init__(
        self,
        device: Device,
        switches: PassSwitches | None = None,
        *,
        strict: bool = False,
        verify: Verify = "off",
        providers: Mapping[str, str] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Choose and order the passes; raise `UsageError` for names that no pass has.

        providers: names of the implementations that the user wants, by op. batch_invariant: leave passes out whose
        kernels can't declare themselves so, where they are not asked for by name.
        """
        switches, passes = switches or PassSwitches(), device_passes(device)
        asked = (*(switches.only or ()), *switches.enable)
        own = (each.name for each in passes if each.traits.own_kernels and each.name not in asked)
        self._implemented = implemented_ops(device.ops, providers or {})
        self._verify = verify
        self.manager = PassManager(
            passes,
            strict=strict,
            only=switches.only,
            disable=(*switches.disable, *(own if batch_invariant else ())),
            enable=switches.enable,
            capabilities=device.capabilities,
            implemented=self._implemented,
        )

    def rewrite(
        self,
        traced: TracedGraph,
        *,
        tokens: tuple[int, int] | None = None,
        sizes: Sequence[Mapping[Any, int]] = (),
        examples: Sequence[tuple[Any, ...]] = (),
        watcher: Watcher | None = None,
        constants: Constants | None = None,
    ) -> Rewritten:
        """Run the passes over one traced graph, which is changed in place, and return what it became.

        - tokens: the least and the most tokens that the graph serves.
        - sizes: what its symbols are in each bucket that it serves.
        - examples: sets of values of its placeholders, to verify on.
        - constants: what passes may know of the graph's constants; None stands for all of it.

        Raises `PassError` where strict.
        """
        constants = bound_constants(traced) if constants is None else constants
        check = self._check(examples, constants)

        # What passes prepare of the weights needs no gradient.
        @torch.no_grad()
        def run(stage: Stage, **form: Any) -> tuple[PassReport, ...]:
            options: dict[str, Any] = {"tokens": tokens, "sizes": sizes, "constants": constants, "check": check, **form}
            if watcher is None:
                return self.manager.run(traced.module, stage, **options)
            watcher.begin(stage, traced)
            reports = self.manager.run(traced.module, stage, observe=watcher.note, **options)
            watcher.end(stage, traced, reports)
            return reports

        start = time.perf_counter()
        reports = run("torch")
        passes_s = time.perf_counter() - start
        aten_s = 0.0
        start = time.perf_counter()
        for staged in later_stages(self.manager.running, traced.module, self._prepare):
            if staged.module is not traced.module:
                aten_s += time.perf_counter() - start
            traced = replace(traced, module=staged.module)
            start = time.perf_counter()
            reports += run(staged.stage, form=staged.form, refused=staged.refused)
            passes_s += time.perf_counter() - start
            start = time.perf_counter()
        added = tuple(ConstantSlot(tensor, constants.packing(name)) for name, tensor in constants.added)
        traced = replace(traced, slots=(*traced.slots, *added))
        return Rewritten(
            traced=traced,
            passes=reports,
            passes_s=passes_s,
            aten_s=aten_s,
            contents=constants.contents,
            sourceless=constants.sourceless,
        )

    def _prepare(self, module: fx.GraphModule) -> None:
        put_back_unimplemented(module, self._implemented)

    def _check(self, examples: Sequence[tuple[Any, ...]], constants: Constants) -> Check | None:
        if self._verify == "off":
            return None
        from core.verify.verify import checker  # only who verifies pays for its import

        return checker(examples, self._verify, constants)
