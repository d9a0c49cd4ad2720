"""New values for the weights of a compiled program, written where its graphs read them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from core.compilation.capture.breaks import models_of
from core.compilation.trace.model_tensors import content_digest
from core.errors import UsageError

NamedTensors: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Weights by the names of the model's `state_dict`."""
_MOST_TOLD = 4
_MOST_DIGESTED = 1 << 20
"""Limit on the bytes of weights whose values passes have used: beyond it a compile takes no digests, and these weights
can't be reloaded."""
_UNREAD = "?"
_ASKED = "load weights into a program"
_BY_STATE_DICT = "give tensors by the names, shapes and dtypes of the model's state_dict()"


@dataclass(frozen=True, slots=True)
class _Place:
    """The address of a weight when the program was compiled. digest: of values that must not change, "" if they may."""

    address: int
    digest: str


class Weights:
    """The weights that a program reads, by name, and what may be written to each; holds no tensor."""

    def __init__(
        self,
        models: Iterable[Callable[..., Any]],
        *,
        captured: bool,
        contents: Iterable[Tensor] = (),
        sourceless: Iterable[str] = (),
    ) -> None:
        """captured: whether any graph is. contents: tensors whose values passes have used.

        sourceless: tensors that passes made from unknown weights.
        """
        self._captured = captured
        self._sourceless = tuple(dict.fromkeys(sourceless))
        self._roots = [(prefix, weakref.ref(root)) for model in models for prefix, root in models_of(model).items()]
        named, self._required, self._ambiguous = _named(self._models())
        depends = tuple({id(tensor): tensor for tensor in contents}.values())
        self._places = {name: _Place(tensor.data_ptr(), _digest_of(tensor, depends)) for name, tensor in named.items()}
        #: Why the weights are unusable at present; "" if they are complete.
        self.mixed = ""

    def load(self, weights: NamedTensors, *, partial: bool = False) -> None:
        """Write new values over the weights; see `Program.load_weights`."""
        if self._sourceless:
            raise UsageError(
                _ASKED,
                found=f"the graphs hold {', '.join(self._sourceless)}, which passes made of nobody knows which weights",
                remedy="compile anew with these weights, or without the pass: disable_passes=(…,)",
            )
        live, _, _ = _named(self._models())
        checks = _Checks(self._places, live, self._ambiguous, captured=self._captured)
        if isinstance(weights, Mapping | Sequence):
            weights = list(_pairs(weights))
            found = [problem for name, tensor in weights if (problem := checks.problem(name, tensor))]
            checks.forget()
            missing = [] if partial else self._missing(dict(weights))
            if found or missing:
                raise UsageError(_ASKED, found=_told(found, missing), remedy=_BY_STATE_DICT)
        self._write(weights, checks, partial=partial)

    def _write(self, weights: NamedTensors, checks: _Checks, *, partial: bool) -> None:
        """Check and write the tensors as they come; after a wrong one the model's weights are unusable."""
        before = self.mixed
        written: set[str] = set()
        try:
            with torch.no_grad():
                for name, tensor in _pairs(weights):
                    problem = checks.problem(name, tensor)
                    if problem:
                        raise UsageError(_ASKED, found=_told([problem], []), remedy=_BY_STATE_DICT)
                    self.mixed = f"loading stopped after {len(written) + 1} of {len(self._places)} weights"
                    checks.live[name].copy_(tensor)
                    written.add(name)
                    checks.written(name)
            missing = [] if partial else self._missing(written)
            if missing:
                raise UsageError(_ASKED, found=_told([], missing), remedy=_BY_STATE_DICT)
        except BaseException as error:
            if not written:
                self.mixed = before
            else:
                error.add_note(f"{len(written)} weights have new values: load all of them before the next call")
            raise
        self.mixed = before if partial else ""

    def _models(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, root in self._roots:
            model = root()
            assert model is not None  # the program holds its models until it is closed
            yield prefix, model

    def _missing(self, given: Iterable[str]) -> list[str]:
        """Return the required names that are not given; a tied weight is given by one of its names."""
        known = set(given)
        memory = {self._places[name].address for name in known & self._places.keys()}
        return [name for name in self._required if name not in known and self._places[name].address not in memory]


class _Checks:
    """Judges tensors one by one, each by what came before it."""

    def __init__(
        self, places: Mapping[str, _Place], live: Mapping[str, Tensor], ambiguous: frozenset[str], *, captured: bool
    ) -> None:
        """live: the weights, as the model has them now."""
        self._places = places
        self.live = live
        self._ambiguous = ambiguous
        self._captured = captured
        self._seen: set[str] = set()
        #: What a tied weight was given first, by address: the tensor, or None where it is written already.
        self._given: dict[int, Tensor | None] = {}

    def forget(self) -> None:
        """Start again: the same tensors will come once more."""
        self._seen.clear()
        self._given.clear()

    def written(self, name: str) -> None:
        """Compare later values of a tied weight with the weight itself."""
        self._given[self._places[name].address] = None

    def problem(self, name: str, tensor: Tensor) -> str:
        """Return what is wrong with a tensor for a name, or ""."""
        place = self._places.get(name)
        if place is None or name not in self.live:
            near = get_close_matches(name, self._places.keys() & self.live.keys(), n=1)
            return f"there is no {name!r}" + (f" (there is {near[0]!r})" if near else "")
        why = self._refusal(name, place) or _unlike(name, self.live[name], tensor)
        if why:
            return why
        if name in self._seen:
            return f"{name!r} is given twice"
        self._seen.add(name)
        if place.digest and (place.digest == _UNREAD or content_digest(tensor) != place.digest):
            return f"{name!r} can't change, as passes made the graphs by its values: compile anew with the new ones"
        if place.address in self._given:
            first = self._given[place.address]
            first = self.live[name] if first is None else first
            if not torch.equal(first.to(tensor.device), tensor):
                return f"{name!r} is tied to another weight, which was given other values"
        self._given.setdefault(place.address, tensor)
        return ""

    def _refusal(self, name: str, place: _Place) -> str:
        live = self.live[name]
        if name in self._ambiguous:
            return f"{name!r} is a weight of several models of the program"
        if type(live) not in (Tensor, nn.Parameter):
            return f"{name!r} is a {type(live).__name__}, whose parts have no names in the state_dict"
        if self._captured and live.data_ptr() != place.address:
            return f"{name!r} was moved or replaced after the compile: the graphs read where it was"
        return ""


def _named(models: Iterable[tuple[str, nn.Module]]) -> tuple[dict[str, Tensor], tuple[str, ...], frozenset[str]]:
    """Return the tensors of the models' state dicts, the names of parameters among them, and names of several models.

    models: each with the prefix of its names.
    """
    named: dict[str, Tensor] = {}
    required: dict[str, None] = {}
    ambiguous = set()
    for prefix, model in models:
        state = model.state_dict(keep_vars=True, prefix=f"{prefix}." if prefix else "")
        for name, tensor in state.items():
            if isinstance(tensor, Tensor) and named.setdefault(name, tensor) is not tensor:
                ambiguous.add(name)
        parameters = model.named_parameters(prefix=prefix, remove_duplicate=False)
        required |= dict.fromkeys(name for name, _ in parameters if name in named)
    return named, tuple(required), frozenset(ambiguous)


def _digest_of(tensor: Tensor, contents: Sequence[Tensor]) -> str:
    """Return the digest of a tensor in whose memory one of `contents` lies, else ""; `_UNREAD` where these are many."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if not any(each.data_ptr() < end and begin < each.data_ptr() + each.nbytes for each in contents):
        return ""
    return content_digest(tensor) if sum(each.nbytes for each in contents) <= _MOST_DIGESTED else _UNREAD


def _pairs(weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    for item in weights.items() if isinstance(weights, Mapping) else weights:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise UsageError(_ASKED, found=f"an item is a {type(item).__name__}", remedy="give pairs (name, tensor)")
        if not isinstance(item[1], Tensor):
            raise UsageError(_ASKED, found=f"{item[0]!r} is a {type(item[1]).__name__}", remedy=_BY_STATE_DICT)
        yield item


def _unlike(name: str, wanted: Tensor, tensor: Tensor) -> str:
    if tensor.shape != wanted.shape:
        return f"{name!r} has shape {tuple(tensor.shape)}, the model's has {tuple(wanted.shape)}"
    if tensor.dtype != wanted.dtype:
        return f"{name!r} is of {tensor.dtype}, the model's of {wanted.dtype}"
    return ""


def _told(problems: Sequence[str], missing: Sequence[str]) -> str:
    told = list(problems[:_MOST_TOLD])
    if len(problems) > _MOST_TOLD:
        told.append(f"{len(problems) - _MOST_TOLD} more of {len(problems)} are wrong")
    if missing:
        more = f" and {len(missing) - _MOST_TOLD} more" if len(missing) > _MOST_TOLD else ""
        told.append(f"missing: {', '.join(map(repr, missing[:_MOST_TOLD]))}{more}")
    return "; ".join(told)
