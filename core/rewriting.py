"""What happens to a traced graph before it is lowered: the passes on Dynamo's ops and, if there are any, on ATen's."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.common.aten import to_aten
from core.common.config import Verify
from core.common.ops.lower import inline_unimplemented
from core.common.passes.declaration import Pass
from core.common.passes.manager import Check, PassManager, PassReport
from core.common.passes.standard import COMMON_PASSES
from core.common.passes.switches import PassSwitches
from core.common.traced import TracedGraph
from core.device import Device

__all__ = ["Rewriter", "Rewritten", "device_passes"]

log = logging.getLogger("core.compilation")


def device_passes(device: Device) -> tuple[Pass, ...]:
    """Return the passes that a graph for this device goes through unless told otherwise, not yet ordered."""
    return (*COMMON_PASSES, *device.passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A rewritten graph, before its canonical ops are lowered, with the account of it.

    aten_s: what lowering to ATen took in seconds, 0.0 where no pass needs it.
    """

    traced: TracedGraph
    passes: tuple[PassReport, ...]
    passes_s: float
    aten_s: float


class Rewriter:
    """Runs the chosen passes over each traced graph of a program."""

    def __init__(
        self,
        device: Device,
        switches: PassSwitches | None = None,
        *,
        strict: bool = False,
        verify: Verify = "off",
    ) -> None:
        """Choose and order the passes; raise `UsageError` for names that no pass has."""
        switches = switches or PassSwitches()
        self._device = device
        self._verify = verify
        self.manager = PassManager(
            device_passes(device),
            strict=strict,
            only=switches.only,
            disable=switches.disable,
            capabilities=device.capabilities,
        )

    def rewrite(
        self, traced: TracedGraph, *, tokens: tuple[int, int] | None = None, examples: Sequence[tuple[Any, ...]] = ()
    ) -> Rewritten:
        """Run the passes over one traced graph, which is changed in place, and return what it became.

        tokens: least and most tokens that the graph serves. examples: values of its placeholders to verify on. Raises
        `PassError` where strict.
        """
        check = self._check(examples)
        start = time.perf_counter()
        reports = self.manager.run(traced.module, tokens=tokens, check=check)
        passes_s = time.perf_counter() - start
        aten_s = 0.0
        if any(declared.stage == "aten" for declared in self.manager.passes):
            start = time.perf_counter()
            # What the device can't run is put back first: patterns on ATen then see it as the model wrote it.
            inline_unimplemented(traced.module, self._device.ops)
            traced = replace(traced, module=to_aten(traced.module))
            aten_s = time.perf_counter() - start
            start = time.perf_counter()
            reports += self.manager.run(traced.module, "aten", tokens=tokens, check=check)
            passes_s += time.perf_counter() - start
        return Rewritten(traced=traced, passes=reports, passes_s=passes_s, aten_s=aten_s)

    def _check(self, examples: Sequence[tuple[Any, ...]]) -> Check | None:
        if self._verify == "off":
            return None
        from core.common.passes.verify import checker  # only who verifies pays for its import

        return checker(examples, self._verify)
