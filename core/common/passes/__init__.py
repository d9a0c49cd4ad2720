"""The public names for writing a pass: a fusion imports from here, its ops from `core.common.ops.<family>`, and nothing
else.

Two submodules belong to it, `view` (what a node computes, whichever way it is spelled) and `calls` (calls of canonical
ops). The passes themselves are in the packages beside these modules, and in the order of execution in standard.py;
nothing here imports them. Each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.common.node_meta import describe as describe
    from core.common.node_meta import set_value as set_value
    from core.common.node_meta import value_of as value_of
    from core.common.ops.arguments import at_least_fp32 as at_least_fp32
    from core.common.ops.declaration import CanonicalOp as CanonicalOp
    from core.common.ops.declaration import find_op as find_op
    from core.common.passes.constants import Constants as Constants
    from core.common.passes.context import PassContext as PassContext
    from core.common.passes.declaration import LIFTS as LIFTS
    from core.common.passes.declaration import Pass as Pass
    from core.common.passes.declaration import PassFunction as PassFunction
    from core.common.passes.declaration import PassTraits as PassTraits
    from core.common.passes.effects import is_impure as is_impure
    from core.common.passes.pass_guards import Guards as Guards
    from core.common.passes.patterns import InductorGraphPattern as InductorGraphPattern
    from core.common.passes.patterns import InductorReplacement as InductorReplacement
    from core.common.passes.patterns import Replacement as Replacement
    from core.common.passes.results import NearMiss as NearMiss
    from core.common.passes.results import PassResult as PassResult
    from core.common.passes.rewrite import apply_sites as apply_sites
    from core.common.passes.rewrite import fuse as fuse
    from core.common.passes.rewrite import remove_dead as remove_dead
    from core.common.passes.sites import MADE_BY as MADE_BY
    from core.common.passes.sites import Finder as Finder
    from core.common.passes.sites import Made as Made
    from core.common.passes.sites import Refused as Refused
    from core.common.passes.sites import Site as Site
    from core.common.passes.sites import near_miss as near_miss
    from core.common.passes.sites import site_name as site_name
    from core.common.passes.values.sizes import expression as expression
    from core.common.passes.values.sizes import same_size as same_size
    from core.common.passes.values.sizes import same_sizes as same_sizes
    from core.common.passes.viewed import Index as Index
    from core.common.passes.viewed import Swap as Swap
    from core.common.passes.viewed import Viewed as Viewed
    from core.common.passes.writes import Writes as Writes

_MODULES = {
    "core.common.node_meta": ("describe", "set_value", "value_of"),
    "core.common.ops.arguments": ("at_least_fp32",),
    "core.common.ops.declaration": ("CanonicalOp", "find_op"),
    "core.common.passes.constants": ("Constants",),
    "core.common.passes.context": ("PassContext",),
    "core.common.passes.declaration": ("LIFTS", "Pass", "PassFunction", "PassTraits"),
    "core.common.passes.pass_guards": ("Guards",),
    "core.common.passes.results": ("NearMiss", "PassResult"),
    "core.common.passes.effects": ("is_impure",),
    "core.common.passes.patterns": ("InductorGraphPattern", "InductorReplacement", "Replacement"),
    "core.common.passes.rewrite": ("apply_sites", "fuse", "remove_dead"),
    "core.common.passes.sites": ("MADE_BY", "Finder", "Made", "Refused", "Site", "near_miss", "site_name"),
    "core.common.passes.values.sizes": ("expression", "same_size", "same_sizes"),
    "core.common.passes.viewed": ("Index", "Swap", "Viewed"),
    "core.common.passes.writes": ("Writes",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
