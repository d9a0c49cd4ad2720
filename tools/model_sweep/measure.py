"""One class by `torch.compile(model, backend="core")`: graphs and breaks, what the passes lifted, and criterion T1."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from core.common.numerics import MIN_ELEMENTS, Fp64Mode, judge_pooled
from core.dynamo.backend import backend
from lift_coverage.match import match_sites
from lift_coverage.oracle import KINDS, Site, find_sites
from model_sweep.families import models
from model_sweep.inputs import attempts
from sweeping import Result, one_line

Inputs = Mapping[str, Tensor]
_OFF = 1e-3
"""Relative error of eager from fp64 above which a class says nothing: what it computes hangs on roundings."""


class Unusable(Exception):
    """A class that transformers' own eager code does not run on any of the inputs tried."""


def examine(family: str, model_type: str) -> Result:
    """Build a class, compile it, judge it. stage: how far it came (build, eager, compile, judge, done)."""
    stage, facts = "build", dict[str, Any]()
    try:
        sizes, model, inputs = _usable(family, model_type)
        facts |= {"class": type(model).__name__, "sizes": sizes}
        stage = "eager"
        eager = _outputs(model, inputs)
        sites = find_sites(model, lambda **given: model(**given), inputs)
        stage = "compile"
        found, report, facts["lifted"] = _compiled(model, inputs, sites)
        facts |= _told(report)
        stage = "judge"
        return {**facts, **_judged(model, inputs, found, eager), "stage": "done"}
    except Exception as error:  # whatever the code of a class raises
        return {**facts, "stage": stage, "error": one_line(error)}


def _usable(family: str, model_type: str) -> tuple[str, nn.Module, Inputs]:
    """Return the first model and inputs that run eagerly; raise what the last attempt of each model raised."""
    problems: list[str] = []
    for sizes, model in models(family, model_type):
        for inputs in attempts(model):
            try:
                _outputs(model, inputs)
                return sizes, model, inputs
            except Exception as error:  # inputs of the wrong rank, mostly
                problems.append(f"{sizes}, {', '.join(f'{n} {tuple(t.shape)}' for n, t in inputs.items())}: {error}")
    raise Unusable(" | ".join(problem[:200] for problem in problems[:3]) or "no inputs are known for it")


@torch.no_grad()
def _outputs(run: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """Return the tensors of a call, caches and all; random numbers are drawn from one seed."""
    torch.manual_seed(0)
    result = run(**inputs)
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    if len(first) != len(second):
        return False
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def _exact(model: nn.Module, inputs: Inputs, eager: Sequence[Tensor]) -> tuple[list[Tensor], str]:
    """Return the fp64 outputs, or why there are none to judge by."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    try:
        with Fp64Mode():
            oracle: Any = copy.deepcopy(model).double()
            if hasattr(oracle, "set_experts_implementation"):
                oracle.set_experts_implementation("eager")  # the others use a grouped product without fp64
            exact = _outputs(oracle, wide)
    except Exception as error:
        return [], f"its fp64 run fails: {one_line(error)}"
    if [tuple(x.shape) for x in exact] != [tuple(x.shape) for x in eager]:
        return [], "its fp64 run gives other shapes"
    norms = [(float((e.double() - x).norm()), float(x.norm())) for e, x in zip(eager, exact, strict=True) if _judges(e)]
    worst = max((error / size for error, size in norms if size), default=0.0)
    return exact, "" if worst < _OFF else f"eager itself is {worst:.1g} away from fp64"


def _judges(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().any())


def _compiled(model: nn.Module, inputs: Inputs, sites: Sequence[Site]) -> tuple[list[Tensor], Any, dict[str, Any]]:
    """Run the class compiled, twice; return the second run's outputs, the report, and sites owed and lifted by kind."""
    torch._dynamo.reset()
    left = list(sites)
    with _rewritten(lambda module: left.__setitem__(slice(None), missed(left, module))):
        run = torch.compile(model, backend=backend, options={"lowering": "inline"})
        for _ in range(2):
            found = _outputs(run, inputs)
    owed, absent = Counter(site.kind for site in sites), Counter(site.kind for site in left)
    lifted = {kind: [owed[kind] - absent[kind], owed[kind]] for kind in KINDS if owed[kind]}
    return found, backend.report(), lifted


def missed(sites: Sequence[Site], module: fx.GraphModule) -> list[Site]:
    """Return the sites that no canonical op of a graph stands for.

    A graph of the whole forward names modules as the model does. One that Dynamo began in a part of it names them from
    there, and serves all parts that are alike: it stands for the sites of each part into which its ops fit whole.
    """
    left = list(sites)
    for prefix in ("", *_prefixes(sites)):
        inside = [(site, site.path.removeprefix(prefix)) for site in left if site.path.startswith(prefix)]
        shortened = [replace(site, path=path) for site, path in inside]
        absent, extra = match_sites(shortened, module, ())
        if prefix and extra:
            continue
        wanting = Counter(miss.site for miss in absent)
        for (site, _), short in zip(inside, shortened, strict=True):
            if wanting[short]:
                wanting[short] -= 1
            else:
                left.remove(site)
    return left


def _prefixes(sites: Sequence[Site]) -> list[str]:
    """Return the paths of all modules around sites, each with a dot behind it, outer ones first."""
    parts = [site.path.split(".") for site in sites]
    return sorted({".".join(each[:count]) + "." for each in parts for count in range(1, len(each))})


@contextmanager
def _rewritten(see: Callable[[fx.GraphModule], None]) -> Iterator[None]:
    """Show each graph after the passes that lift, once, while it has all of its canonical ops.

    Those that the device lacks are put back for passes on ATen ops; where no such pass has anything to do, they are
    put back, and the others implemented, at the end.
    """
    import core.compilation.rewriting as rewriting
    import core.dynamo.graph as graph

    put_back: Any = vars(rewriting)["put_back_unimplemented"]
    choose: Any = vars(graph)["choose_implementations"]
    early: list[fx.GraphModule] = []

    def putting_back(module: fx.GraphModule, *args: Any, **named: Any) -> Any:
        see(module)
        early.append(module)
        return put_back(module, *args, **named)

    def choosing(module: fx.GraphModule, *args: Any, **named: Any) -> Any:
        if early:
            early.clear()
        else:
            see(module)
        return choose(module, *args, **named)

    with (
        mock.patch.object(rewriting, "put_back_unimplemented", putting_back),
        mock.patch.object(graph, "choose_implementations", choosing),
    ):
        yield


def _told(report: Any) -> dict[str, Any]:
    return {
        "graphs": len(report.graphs),
        "breaks": dict(sum((Counter({_short(why): n}) for why, n in report.graph_breaks.items()), Counter[str]())),
        "originals": dict(report.originals),
        "undone": [f"{each.name}: {each.error}" for graph in report.graphs for each in graph.passes if each.error],
        "notes": sorted({note for graph in report.graphs for note in graph.notes}),
    }


def _short(why: str) -> str:
    """Return why Dynamo broke a graph without its advice and paths of this machine."""
    told, _, place = why.partition(" (/")
    told = re.split(r" Explanation: | Hint: | Developer debug ", told)[0]
    return f"{told} ({re.sub(r'.*/site-packages/', '', place)}" if place else told


def _judged(model: nn.Module, inputs: Inputs, found: Sequence[Tensor], eager: Sequence[Tensor]) -> dict[str, Any]:
    """Judge all outputs: metadata and what is no float must be equal, floats of one dtype pass T1 together."""
    told = [[f"{tuple(t.shape)} {t.dtype}" for t in side] for side in (found, eager)]
    if told[0] != told[1]:
        return {"passed": False, "reason": f"outputs {told[0]} instead of {told[1]}"[:300]}
    if _alike(found, eager):
        return {"passed": True, "equal": True, "ratio": 0.0, "reason": ""}
    if not _alike(eager, _outputs(model, inputs)):
        return {"passed": None, "reason": "two eager runs with one seed differ"}
    exact, odd = _exact(model, inputs, eager)
    if odd:
        return {"passed": None, "reason": odd}
    return _by_errors(found, eager, exact)


def _by_errors(found: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, Any]:
    groups: dict[tuple[Any, bool], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for index, each in enumerate(zip(found, eager, exact, strict=True)):
        if not each[1].is_floating_point():
            if not torch.equal(each[0], each[1]):
                return {"passed": False, "reason": f"output {index} of {each[1].dtype} differs"}
        elif each[1].numel():
            large = each[1].numel() >= MIN_ELEMENTS
            groups.setdefault((index if large else each[1].dtype, large), []).append(each)
    ratio, reasons, unjudged = 0.0, list[str](), ""
    for (name, _), group in groups.items():
        if sum(each[1].numel() for each in group) < MIN_ELEMENTS:
            if not all(torch.equal(g, e) for g, e, _ in group):
                unjudged = f"outputs of fewer than {MIN_ELEMENTS} elements differ, too few to judge"
            continue
        verdict = judge_pooled(*zip(*group, strict=True))
        ratio = max(ratio, verdict.rms_ratio, verdict.max_ratio)
        reasons += [] if verdict.passed else [f"output {name}: {verdict.reason}"]
    if unjudged and not reasons:
        return {"passed": None, "reason": unjudged}
    return {"passed": not reasons, "equal": False, "ratio": ratio, "reason": "; ".join(reasons[:3])}
