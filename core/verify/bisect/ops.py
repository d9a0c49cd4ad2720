"""Each chosen implementation of a canonical op against the op's reference, on the values of a real run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from core.common.ops.declaration import CanonicalOp, declared_ops
from core.common.ops.implementation import OpImplementation
from core.common.passes.sites import site_name
from core.compilation.implementations import ORIGINAL_NODES, OpChoice
from core.compilation.rewrite.snapshot import Snapshot
from core.verify.bisect.report import Fault, Step
from core.verify.compare import Comparison, strides_problem
from core.verify.execution import Copies, Place, ReferenceMode, Watcher, error_line, run_graph

OpTargets = Mapping[str, Any]
"""Canonical ops (`torch._ops.OpOverload`) by the names of their nodes in a finished graph."""


_AT_FAULT = "what follows was judged with the op's reference instead"


@dataclass(slots=True)
class _Tally:
    """The judgement of one implementation."""

    implementation: OpImplementation
    sites: set[str] = field(default_factory=set)
    compared: Comparison = field(default_factory=Comparison)
    fault: Fault | None = None


def op_targets(choices: Sequence[OpChoice]) -> OpTargets:
    """Return the canonical op of each node that runs an implementation of it, or its reference, by node name."""
    return {
        choice.node: declared_ops()[choice.op].overload for choice in choices if choice.implementation != ORIGINAL_NODES
    }


def as_ops(module: fx.GraphModule, targets: OpTargets) -> fx.GraphModule:
    """Return a copy of a finished graph in which these nodes are their ops again.

    The copy tells what the nodes write, and it can be run in fp64.
    """
    copy = Snapshot(module).module()
    for node in copy.graph.nodes:
        node.target = targets.get(node.name, node.target)
    copy.recompile()
    return copy


def judge_ops(
    phase: str,
    module: fx.GraphModule,
    choices: Sequence[OpChoice],
    implementations: Sequence[OpImplementation],
    inputs: Sequence[Sequence[Any]],
    *,
    owner: str,
    sample: bool = False,
) -> tuple[list[Step], list[Fault]]:
    """Judge every implementation in a finished graph, each call on the inputs that it gets when everything else is
    right.

    An implementation at fault gives way to the op's reference in the graph, at all its calls.

    - choices: what `choose_implementations` said.
    - sample: judge a third of the calls of each implementation.
    """
    by_name = {(each.op, each.name): each for each in implementations}
    chosen = {each.node: each for each in choices if (each.op, each.implementation) in by_name}
    tallies = {
        (each.op, each.implementation): _Tally(by_name[each.op, each.implementation]) for each in chosen.values()
    }
    watched = {name: tallies[each.op, each.implementation] for name, each in chosen.items()}
    judged = _third(watched) if sample else watched
    named = as_ops(module, op_targets(choices))
    for values in inputs if judged else ():
        place = Place()
        try:
            run_graph(named, values, watchers=[place, _Watch(phase, owner, judged)])
        except Exception as error:  # judging the lowering reports it in full
            for tally in judged.values():
                tally.compared.unjudged = f"the graph stops at {place}: {error_line(error)}"
            break
    for node in module.graph.nodes:
        if node.name in watched and watched[node.name].fault is not None:
            node.target = declared_ops()[chosen[node.name].op].reference
    module.recompile()
    calls = Counter(map(id, watched.values()))
    steps = [_step(phase, owner, tally, calls[id(tally)]) for tally in tallies.values()]
    steps += _unimplemented(phase, owner, [each for each in choices if each.node not in chosen])
    return steps, [tally.fault for tally in tallies.values() if tally.fault is not None]


def _third(watched: Mapping[str, _Tally]) -> dict[str, _Tally]:
    kept: dict[str, _Tally] = {}
    for tally in {id(tally): tally for tally in watched.values()}.values():
        names = [name for name, each in watched.items() if each is tally]
        # Seeded by the implementation: a failure is found again by the next run.
        names = random.Random(tally.implementation.name).sample(names, max(1, len(names) // 3))
        kept |= dict.fromkeys(names, tally)
    return kept


def _step(phase: str, owner: str, tally: _Tally, calls: int) -> Step:
    return Step(
        phase=phase,
        kind="op",
        name=f"{tally.implementation.op} -> {tally.implementation.name}",
        owner=owner,
        outcome=tally.compared.outcome,
        matched=calls,
        num_sites=len(tally.sites),
        num_values=tally.compared.num_values,
        worst_ratio=tally.compared.worst,
        note=_AT_FAULT if tally.fault else tally.compared.unjudged,
    )


def _unimplemented(phase: str, owner: str, choices: Sequence[OpChoice]) -> list[Step]:
    counts = Counter(f"{choice.op} -> {choice.implementation}" for choice in choices)
    note = "no implementation of the device applies: there is nothing to compare"
    return [
        Step(phase=phase, kind="op", name=name, owner=owner, outcome="skipped", matched=count, note=note)
        for name, count in counts.items()
    ]


class _Watch(Watcher):
    """Runs implementation and reference where an op is about to run."""

    def __init__(self, phase: str, owner: str, watched: Mapping[str, _Tally]) -> None:
        self._phase, self._owner, self._watched = phase, owner, watched

    def before(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Judge the implementation chosen for this node."""
        tally = self._watched.get(node.name)
        if tally is None:
            return
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        op = declared_ops()[tally.implementation.op]
        tally.sites.add(node.name)
        failed = self._judge(tally, op, op.bind(args, kwargs).args)
        if failed and tally.fault is None:
            name, reason, ratio = failed[0]
            tally.fault = Fault(
                phase=self._phase,
                kind="op",
                name=tally.implementation.name,
                owner=self._owner,
                site=site_name(node),
                nodes=(node.name,),
                reason=f"{name}: {reason}",
                ratio=ratio,
                op=op.qualified_name,
            )

    def _judge(self, tally: _Tally, op: CanonicalOp, arguments: Mapping[str, Any]) -> list[tuple[str, str, float]]:
        old = _call(op, op.reference, arguments)
        try:
            new = _call(op, tally.implementation.fn, arguments)
        except Exception as error:
            return [tally.compared.fail("the call", f"it raised {error_line(error)}")]
        num_outputs = len(old) - len(op.mutates)
        names = [*(f"output {index}" for index in range(num_outputs)), *(f"written {name}" for name in op.mutates)]

        def exact() -> list[Any]:
            with ReferenceMode():
                return _call(op, op.reference, arguments, fp64=True)

        failed = tally.compared.add(names, new, old, exact)
        for name, result, wanted in zip(names[:num_outputs], new, old, strict=False):
            if not failed and (problem := strides_problem(result, wanted)):
                failed = [tally.compared.fail(name, problem)]
        return failed


def _call(op: CanonicalOp, fn: Any, arguments: Mapping[str, Any], *, fp64: bool = False) -> list[Any]:
    """Run an implementation on arguments of its own; return its results, then what it has written into."""
    copies = Copies(fp64)
    own = {name: pytree.tree_map(copies.of, v) if fp64 or name in op.mutates else v for name, v in arguments.items()}
    schema = op.overload._schema.arguments
    positional = [own[each.name] for each in schema if not each.kwarg_only]
    named = {each.name: own[each.name] for each in schema if each.kwarg_only}
    with torch.no_grad():
        result = fn(*positional, **named)
    return [*pytree.tree_leaves(result), *(own[name] for name in op.mutates)]
