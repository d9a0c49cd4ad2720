"""Passes inside Inductor: declared passes as the single custom pass that Inductor runs before lowering a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Form
from core.compilation.rewrite.inductor_patterns import prepare
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport

_MOVES = "move_readers"


class InductorPass(CustomGraphPass):
    """Passes of the stages functional and aten as Inductor's `post_grad_custom_post_pass`.

    `reports` tells of the last graph. Inductor's graphs are functional, in the form that its configuration says.
    """

    def __init__(self, manager: PassManager) -> None:
        self._manager = manager
        self.reports: tuple[PassReport, ...] = ()

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes on the graph that Inductor is about to lower."""
        module = graph.owning_module
        assert module is not None
        form: Form = "v2" if torch._inductor.config.enable_auto_functionalized_v2 else "v1"
        self.reports = self._manager.run(module, "functional", form=form) + self._manager.run(module, "aten")

    def uuid(self) -> str:
        """Return the key by which Inductor's cache distinguishes these passes."""
        uuids = (*self._manager.uuids("functional"), *self._manager.uuids("aten"))
        return hashlib.sha256("".join(uuids).encode()).hexdigest()


def as_inductor_pass(passes: Sequence[Pass], **options: Any) -> InductorPass:
    """Return the passes as one `post_grad_custom_post_pass`; options are those of `PassManager`.

    Patterns are traced now, not in the middle of a compilation. A pass that may move readers before writes
    (`fix_functionalization`) does not: Inductor may compute them later all the same.
    """
    here = [replace(p, params={**p.params, _MOVES: False}) if _MOVES in p.params else p for p in passes]
    manager = PassManager(here, **options)
    for declared in manager.passes:
        if declared.mechanism == "inductor":
            prepare(declared)
    return InductorPass(manager)
