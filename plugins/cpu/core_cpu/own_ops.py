"""The plugin's own ops: a canonical op's schema and fake, and a kernel of the extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from core.common.ops.declaration import CanonicalOp
from core_cpu import extension

LIBRARY = torch.library.Library("core_cpu", "DEF")
SOURCES_OF: dict[torch._ops.OpOverload, str] = {}
"""The name of the file in csrc/ that has the kernel of each op."""
CALLED_BY: dict[Callable[..., Any], torch._ops.OpOverload] = {}
"""The op of `SOURCES_OF` that a function calls which is an implementation itself, and which lowerings trace."""


def own_op(op: CanonicalOp, source: str, ending: str = "") -> torch._ops.OpOverload:
    """Declare `core_cpu::<name>` as the canonical op of that name is declared, and return it.

    source: the name of the file in csrc/ that has its kernel. ending: of the own op's name, where it is not the first.
    """

    def unloaded(*args: Any, **kwargs: Any) -> Any:
        """Run a call in a process that has asked no condition, as one that reads its graphs from the compile cache.

        Once loaded, the extension registers the op's kernel for the processor, which goes before this function.
        """
        return op.reference(*args, **kwargs) if extension.load(source) else own(*args, **kwargs)

    # As core declares its own ops: the schema and the fake are those of the canonical op.
    name = op.name + ending
    LIBRARY.define(name + op.schema.removeprefix(op.name))
    LIBRARY.impl(name, unloaded, "CompositeExplicitAutograd")
    torch.library.register_fake(f"core_cpu::{name}", op.fake, lib=LIBRARY)
    own: torch._ops.OpOverload = getattr(torch.ops.core_cpu, name).default
    SOURCES_OF[own] = source
    return own
