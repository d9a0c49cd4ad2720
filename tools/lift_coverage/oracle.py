"""Which sites of each kind a model has, read off an eager run: the denominators of coverage.

The passes are judged by what is counted here, so nothing here knows them: sites are found by classes of modules, names
of functions and aten ops at run time.

rms_norm: a call of a module named like a norm whose own ops scale its input by the inverse root of its mean square.
layer_norm: the same with the mean taken away first. add_rms_norm: an addition of two tensors of one shape whose sum is
the input of an rms_norm. gated_activation: a product, inside an MLP or an expert, of an activation and a linear map of
one shape. attention: a call of a module named like attention in which a softmax feeds a product of matrices. rotary:
the tensors that one module call rotates by the same tables, a query and a key together or a single one. moe_route: a
module call that chooses the largest of some scores, attention apart. experts: a call of a module named like experts
that multiplies matrices. short_convolution: a causal convolution of single channels over a few steps. recurrence: a
call of a module named like one that takes an exponential itself, by which a state decays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lift_coverage.observe import FunctionCall, ModuleCall, Observation, Op, observe
from lift_coverage.states import convolutions, recurrences
from lift_coverage.walk import VIEWS, Walk

KINDS = (
    *("rms_norm", "add_rms_norm", "gated_activation", "attention", "rotary"),
    *("layer_norm", "moe_route", "experts", "short_convolution", "recurrence"),
)
"""All kinds of sites, in the order of reports."""

_LINEAR = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback", "linear", "convolution"})
_SHIFTS = frozenset({"add", "mul", "clamp", "clamp_min", "clamp_max", "div", "cat", "index_put"})
_MATMUL = frozenset({"mm", "bmm", "baddbmm", "addmm", "matmul"})
_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
_ACTIVATION = frozenset({"silu", "gelu", "relu", "leaky_relu", "elu", "hardswish", "hardtanh", "mish", "softplus"})
_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
_NORM = re.compile(r"norm", re.IGNORECASE)
# Some decoder layers are named after the attention in them.
_ATTENTION = re.compile(r"(attention|attn)(?!\w*layer)", re.IGNORECASE)
_NO_ROUTE = re.compile(_ATTENTION.pattern + "|indexer", re.IGNORECASE)
_ROUTE = re.compile(r"rout|gat(e|ing)|moe|expert", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|expert|glu|moe$|moe_?block", re.IGNORECASE)
_NO_MLP = re.compile(r"router|gate$|attention|attn|mixer|mamba|deltanet", re.IGNORECASE)
_ROTATE = re.compile(r"apply_\w*(rot|rope)", re.IGNORECASE)
_TURN = re.compile(r"rotate_(half|every|pair)", re.IGNORECASE)
_TABLES = re.compile(r"cos|sin|freq|pos_emb|position_emb", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Site:
    """One site. path: of the module; class_name: its class. parts: how many canonical ops, or rotated tensors, it owes.

    form: what tells this way to write it from others, for reports.
    """

    kind: str
    path: str
    class_name: str
    parts: int = 1
    form: str = ""


def find_sites(model: nn.Module, function: Callable[..., Any], inputs: Mapping[str, Tensor]) -> tuple[Site, ...]:
    """Run `function(**inputs)`, which calls the model eagerly, and return every site it went through."""
    return read_sites(observe(model, function, inputs, watch=_is_rotation, tables=_is_table))


def read_sites(seen: Observation) -> tuple[Site, ...]:
    """Return every site of a run; rotations only if it was observed with the names that `find_sites` gives."""
    reader = _Reader(seen)
    norms = list(reader.norms())
    return (
        *(site for site, _ in norms),
        *reader.sums([call for site, call in norms if site.kind == "rms_norm"]),
        *reader.gates(),
        *reader.attentions(),
        *reader.rotations(),
        *reader.inline_rotations(),
        *reader.routes(),
        *reader.experts(),
        *(Site("short_convolution", call.path, call.class_name) for call in convolutions(reader)),
        *(Site("recurrence", call.path, call.class_name) for call in recurrences(reader)),
    )


def _is_rotation(name: str) -> bool:
    return bool(_ROTATE.search(name) or _TURN.search(name))


def _is_table(name: str) -> bool:
    return bool(_TABLES.search(name))


class _Reader(Walk):
    """Finds the sites of each kind."""

    def norms(self) -> Iterator[tuple[Site, ModuleCall]]:
        """Yield rms and layer norms with their module calls."""
        for call in self.seen.calls:
            ops = self.own.get(call.index, [])
            if ops and _NORM.search(call.class_name):
                kind = self._norm_kind(ops)
                if kind:
                    yield Site(kind, call.path, call.class_name, form=self._form(ops)), call

    def _norm_kind(self, ops: list[Op]) -> str:
        names = {op.name for op in ops}
        if names & {"native_layer_norm", "var_mean"}:
            return "layer_norm"
        if names & {"rms_norm", "_fused_rms_norm"}:
            return "rms_norm"
        root = next((op for op in ops if _is_inverse_root(op) and "mean" in self._above(op, 4)), None)
        if root is None:
            return ""
        if any(op.name == "sub" and any("mean" in self._names(v, 2) for v in op.inputs) for op in ops):
            return "layer_norm"
        squares = [op for op in self._chain(root, 6) if op.name in ("pow", "mul", "square")]
        squared = {self._root(v) for op in squares for v in op.inputs}
        scaled = {self._root(v) for op in ops if op.name == "mul" and self._uses(op, root) for v in op.inputs}
        return "rms_norm" if squared & scaled else ""

    def sums(self, norms: list[ModuleCall]) -> Iterator[Site]:
        """Yield the additions that feed an rms_norm, each once; the last step of a rotation is none."""
        done = self._rotating()
        for call in norms:
            made = self.seen.producer(call.input)
            if made is None or made.index in done or made.name not in ("add", "add_") or len(made.inputs) != 2:
                continue
            first, second = (self.seen.values[value].shape for value in made.inputs)
            if first == second:
                done.add(made.index)
                yield Site("add_rms_norm", call.path, call.class_name)

    def gates(self) -> Iterator[Site]:
        """Yield the products of an activation and a linear map inside MLPs and experts."""
        for op in self.seen.ops:
            if op.name not in ("mul", "mul_") or len(op.inputs) != 2:
                continue
            shapes = {self.seen.values[value].shape for value in op.inputs}
            owner = self._owner(op, _MLP, _NO_MLP) if len(shapes) == 1 else None
            if owner is None or self._activation_module(op, owner):
                continue
            for gate, up in (op.inputs, op.inputs[::-1]):
                act = self._activation(gate, owner)
                if act and self._is_linear(up):
                    yield Site("gated_activation", owner.path, owner.class_name, form=act)
                    break

    def _activation(self, value: int, owner: ModuleCall) -> str:
        made = self._made(value, VIEWS)
        if made is None:
            return ""
        module = self._activation_module(made, owner)
        if module:
            return module
        if made.name.rstrip("_") in _ACTIVATION:
            return made.name.rstrip("_")
        if made.name in ("mul", "mul_") and any(self._is(v, "sigmoid") for v in made.inputs):
            return "x * sigmoid"
        return ""

    def _activation_module(self, op: Op, owner: ModuleCall) -> str:
        """Return the class of the activation's module, below the owner, that an op belongs to, or ""."""
        for call in self.seen.ancestors(op.call):
            if call.index == owner.index:
                break
            if call.module_of_class in _ACTIVATION_MODULES:
                return call.class_name
        return ""

    def _is_linear(self, value: int) -> bool:
        """Tell whether a value is a linear map's, clamped or shifted by a number at most."""
        for _ in range(8):
            made = self._made(value, VIEWS)
            if made is None or made.name in _LINEAR:
                return made is not None
            if made.name.rstrip("_") not in _SHIFTS:
                return False
            # A bias or a scale may be added to what the linear map gave, which is the larger.
            value = max(made.inputs, key=lambda v: len(self.seen.values[v].shape), default=-1)
        return False

    def attentions(self) -> Iterator[Site]:
        """Yield the module calls that attend, innermost first named."""
        parts: dict[int, list[str]] = {}
        for op in self.seen.ops:
            if "scaled_dot_product" in op.name or (op.name in _SOFTMAX and self._feeds_matmul(op)):
                owner = self._owner(op, _ATTENTION)
                if owner is not None:
                    parts.setdefault(owner.index, []).append("softmax" if "softmax" in op.name else "sdpa")
        for index, forms in parts.items():
            call = self.seen.calls[index]
            yield Site("attention", call.path, call.class_name, parts=len(forms), form=", ".join(sorted(set(forms))))

    def _feeds_matmul(self, op: Op) -> bool:
        values, seen = list(op.outputs), 0
        while values and seen < 50:
            seen += 1
            for user in self.users.get(values.pop(), ()):
                if user.name in _MATMUL:
                    return True
                if user.name in VIEWS or user.name in ("mul", "div", "where", "masked_fill"):
                    values += user.outputs
        return False

    def rotations(self) -> Iterator[Site]:
        """Yield the groups of tensors that one module call rotates by the same tables."""
        groups: dict[tuple[int, object], list[FunctionCall]] = {}
        for function in self.seen.functions:
            if function.parent < 0:
                groups.setdefault((function.call, frozenset(function.tables)), []).append(function)
        for (index, _), functions in groups.items():
            call = self.seen.calls[index] if index >= 0 else None
            form = f"{functions[0].name}, {self._form(self.seen.ops[functions[0].start : functions[0].stop])}"
            parts = sum(function.num_results for function in functions)
            yield Site("rotary", call.path if call else "", call.class_name if call else "", parts, form)

    def inline_rotations(self) -> Iterator[Site]:
        """Yield the module calls that multiply by cosines outside of any function named like a rotation."""
        inside = self._rotating()
        tables: set[int] = set()
        rotated: dict[int, set[int]] = {}
        for op in self.seen.ops:
            known = [value in tables for value in op.inputs]
            if op.name in ("cos", "polar") or (any(known) and (all(known) or (op.name in VIEWS and known[0]))):
                tables.update(op.outputs)
            elif any(known) and op.name in ("mul", "mul_") and op.index not in inside:
                data = {self.source(value) for value in op.inputs if value not in tables}
                rotated.setdefault(op.call, set()).update(data)
        for index, data in rotated.items():
            call = self.seen.calls[index] if index >= 0 else None
            yield Site("rotary", call.path if call else "", call.class_name if call else "", len(data), "inline")

    def _rotating(self) -> set[int]:
        """Return the ops inside functions named like a rotation."""
        return {index for function in self.seen.functions for index in range(function.start, function.stop)}

    def routes(self) -> Iterator[Site]:
        """Yield the module calls that choose experts."""
        done: set[int] = set()
        for op in self.seen.ops:
            if op.name == "topk" and op.call not in done and self._owner(op, _ROUTE, _NO_ROUTE) is not None:
                done.add(op.call)
                call = self.seen.calls[op.call]
                yield Site("moe_route", call.path, call.class_name, form=self._form(self.own[op.call]))

    def experts(self) -> Iterator[Site]:
        """Yield the calls of experts' modules."""
        for call in self.seen.calls:
            names = {op.name for op in self.own.get(call.index, [])}
            if re.search(r"experts", call.class_name, re.IGNORECASE) and names & _LINEAR:
                yield Site("experts", call.path, call.class_name, form=", ".join(sorted(names & _LINEAR)))


def _is_inverse_root(op: Op) -> bool:
    return op.name in ("rsqrt", "reciprocal", "sqrt") or (op.name == "pow" and -0.5 in op.numbers)
