"""`torch.compile(model, backend="core")`: Dynamo keeps guards and side effects, `core` compiles each of its graphs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

import core.common.ops.canonical  # noqa: F401  # declares the canonical ops that graphs may hold
from core.common.collector import paused
from core.common.fakes import apply_late
from core.compilation.trace.strides import stride_dependence
from core.device import Device
from core.dynamo.graph import CompiledGraph
from core.dynamo.options import BackendOptions
from core.dynamo.original import devices, why_original
from core.dynamo.report import Accounts, BackendReport, GraphAccount
from core.errors import CoreError, UsageError, one_line
from core.host.selection import select_device

log = logging.getLogger("core.dynamo")
Compiled = Callable[..., Sequence[Tensor]]


class Backend:
    """The backend, as torch finds it by the entry point group `torch_dynamo_backends`; one for the process."""

    __name__ = "core"

    def __init__(self) -> None:
        self._accounts = Accounts()
        self._num_breaks = 0

    def __call__(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """Compile one graph of Dynamo. mode, options: as `torch.compile` was given them (`BackendOptions`).

        A graph that can't be compiled without changing what it means runs as Dynamo traced it, which is logged once for
        each reason and counted; with `strict` that is a `UsageError`.
        """
        settings = BackendOptions.of(options, mode)
        account = _account(graph)
        self._accounts.add(account)
        self._count_breaks()
        device, why = _device_of(graph, settings)
        why = why or why_original(graph, examples)
        if not why and device is not None and not device.capabilities.keeps_strides:
            why = stride_dependence(graph)
        if not why and device is not None:
            apply_late(device.fakes)
            try:
                with paused(), torch.inference_mode(False):
                    return CompiledGraph(graph, examples, options=settings, device=device, account=account)
            except UsageError:
                raise
            except CoreError as error:
                if settings.strict:
                    raise
                why = one_line(str(error))
        if settings.strict:
            raise UsageError(
                f"compiling {account.name} with torch.compile(backend='core') and strict",
                found=why,
                remedy="mend that, or leave strict out: the graph then runs as Dynamo traced it",
            )
        account.original = why
        self._accounts.tell_original(account, why)
        return _counted(graph.forward, account)

    def report(self, *, reset: bool = False) -> BackendReport:
        """Return what was done with each graph so far. reset: begin anew afterwards."""
        self._count_breaks()
        report = self._accounts.report()
        if reset:
            self._accounts.reset()
        return report

    def reset(self) -> None:
        """Forget all graphs; torch calls this in `torch._dynamo.reset()`."""
        self._accounts.reset()
        self._num_breaks = 0

    def _count_breaks(self) -> None:
        """Count the graph breaks that Dynamo has noted since the last time."""
        noted: Sequence[Any] = torch._dynamo.utils.graph_break_reasons
        if len(noted) < self._num_breaks:
            self._num_breaks = 0  # Dynamo was reset
        for reason in noted[self._num_breaks :]:
            self._accounts.count_break(_told(reason))
        self._num_breaks = len(noted)


backend = Backend()
"""What the entry point names."""


def backend_report(*, reset: bool = False) -> BackendReport:
    """Return what `torch.compile(backend="core")` did with each graph of this process, with counts of its calls.

    `print` it for a table. reset: begin anew afterwards; `torch._dynamo.reset()` does so too.
    """
    return backend.report(reset=reset)


def _account(graph: fx.GraphModule) -> GraphAccount:
    name, place = _frame()
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    broken = _told(reason) if reason is not None and reason.graph_break else ""
    return GraphAccount(name=name, place=place, num_nodes=len(graph.graph.nodes), graph_break=broken)


def _frame() -> tuple[str, str]:
    """Return name and place of the function that Dynamo is compiling: of a module, that of its class."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator.current_tx().output.root_tx
    code = translator.f_code
    modules = [value for value in translator.f_locals.values() if isinstance(value, torch.nn.Module)]
    name = f"{type(modules[0]).__name__}.forward" if modules else code.co_qualname
    if code.co_name.startswith("torch_dynamo_resume_in"):
        name += f" from line {code.co_firstlineno} on"
        return name, f"{code.co_filename}:{code.co_firstlineno}"
    # What is compiled may be called through a function of a library, or of core.optimize.
    code = getattr(inspect.unwrap(type(modules[0]).forward), "__code__", code) if modules else code
    return name, f"{code.co_filename}:{code.co_firstlineno}"


def _told(reason: Any) -> str:
    """Return a graph break in one line: why, and the user's line."""
    why = one_line(str(reason.reason).partition("\n\n")[0])
    frame = reason.user_stack[-1] if reason.user_stack else None
    return why if frame is None else f"{why} ({frame.filename}:{frame.lineno}, in {frame.name})"


def _device_of(graph: fx.GraphModule, settings: BackendOptions) -> tuple[Device | None, str]:
    """Return the device that a graph is compiled for, or why there is none.

    Raises `CoreError` for a device that can't be selected.
    """
    found = devices(graph)
    if not found:
        return None, "it computes no tensor"
    device = settings.device
    if device is not None:
        device = device if isinstance(device, Device) else _selected(str(device))
        wanted = device.torch_device
        others = {each.type for each in found} - {wanted.type}
        if others:
            return None, f"its tensors are on {', '.join(sorted(others))}, and the device asked for is on {wanted}"
        return device, ""
    if len(found) > 1:
        return None, f"its tensors are on several devices: {', '.join(sorted(map(str, found)))}"
    (own,) = found
    return _selected(own.type if own.index is None else f"{own.type}:{own.index}"), ""


@lru_cache(maxsize=16)
def _selected(name: str) -> Device:
    return select_device(name)


def _counted(original: Compiled, account: GraphAccount) -> Compiled:
    """Return the graph as Dynamo traced it, its calls counted."""

    def run(*args: Any) -> Sequence[Tensor]:
        account.originals[account.original] += 1
        return original(*args)

    return run
