"""Host-side arguments: values that an Acme kernel takes from the host at launch, renewed before each replay.

A graph of such a device keeps the values of its capture, so a step that did not renew them would attend to the lengths
of another batch. `HOST_ARGUMENTS` declares which arguments of which ops are of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from core.common.conformance import HostArgumentExample
from core.common.graphs.recorder import Recording
from core.common.graphs.tape import Call
from core.errors import CaptureError, UsageError


@torch.library.custom_op("acme::window_sum", mutates_args=())
def window_sum(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sum the first `lengths[i]` entries of row i. x: [rows, columns]; result: [rows], of x's dtype."""
    if x.dim() != 2 or len(lengths) != x.shape[0] or not all(0 <= length <= x.shape[1] for length in lengths):
        raise UsageError(
            f"acme::window_sum of lengths {list(lengths)}",
            found=f"x has the shape {tuple(x.shape)}",
            remedy="give one length per row, each between 0 and the number of columns",
        )
    inside = torch.arange(x.shape[1]) < torch.tensor(list(lengths), dtype=torch.int64).unsqueeze(1)
    return torch.where(inside, x, torch.zeros((), dtype=x.dtype)).sum(dim=1, dtype=x.dtype)


@window_sum.register_fake
def _window_sum_fake(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return x.new_empty(x.shape[0])


HOST_ARGUMENTS: Mapping[Any, frozenset[str]] = {torch.ops.acme.window_sum.default: frozenset({"lengths"})}
"""By op overload, the names of its host-side arguments; each is an `int` or a list of them in the op's schema."""


def window_sum_example(device: torch.device) -> HostArgumentExample:
    """Return a call of the toy op, on which the conformance suite tries the renewal of its lengths."""
    return HostArgumentExample(
        function=torch.ops.acme.window_sum.default,
        inputs={"x": torch.linspace(1, 2, 3 * 8, device=device).view(3, 8)},
        steps=({"lengths": [1, 2, 3]}, {"lengths": [8, 0, 5]}, {"lengths": [4, 4, 4]}),
    )


_TYPES = ("int", "List[int]")  # how torch spells int and SymInt, and lists of them


@dataclass(slots=True)
class HostArgument:
    """One name: the value of the recording, and every place on the tape that a new value has to reach."""

    captured: int | list[int]
    places: list[tuple[Any, int | str]] = field(default_factory=list)

    def refuse(self, value: object) -> str | None:
        """Return why a new value does not fit, or None."""
        if isinstance(self.captured, int):
            return None if _is_int(value) else f"{value!r} is not an int"
        if not isinstance(value, (list, tuple)) or not all(map(_is_int, value)):
            return f"{value!r} is not a list of ints"
        if len(value) != len(self.captured):
            return f"it has {len(value)} entries, and {len(self.captured)} were captured"
        return None

    def set(self, value: Any) -> None:
        """Put a value that fits into every recorded call; later changes of the caller's list do not reach it."""
        for container, place in self.places:
            container[place] = value if isinstance(value, int) else list(value)


class HostRecording(Recording):
    """A recording that also notes where its tape holds host-side arguments: in `host`, by name."""

    def __init__(self) -> None:
        self.host: dict[str, HostArgument] = {}
        super().__init__()

    def recorded(self, call: Call) -> None:
        """Note the places of the host-side arguments of one call."""
        _bind(call, self.host)


def _bind(call: Call, host: dict[str, HostArgument]) -> None:
    op: Any = call.op
    args, kwargs = call.args, call.kwargs
    names = HOST_ARGUMENTS.get(op)
    if names is None:
        return
    for position, argument in enumerate(op._schema.arguments):
        if argument.name not in names:
            continue
        assert str(argument.type) in _TYPES, argument
        container, place = _place(op, position, args, kwargs)
        value = container[place]
        known = host.setdefault(argument.name, HostArgument(value if isinstance(value, int) else list(value)))
        refuse_other_value(op, argument.name, known.captured, value)
        known.places.append((container, place))


def refuse_other_value(where: object, name: str, earlier: object, value: object) -> None:
    """Raise `CaptureError` where two calls of one name got different values: an update by name cannot renew both."""
    if earlier != value:
        raise CaptureError(
            f"capture of {where}",
            found=f"the host-side argument {name!r} is {value} here and {earlier} in an earlier call, and one update "
            "reaches both",
            remedy="give all calls under one key the same value",
        )


def check(where: object, host: Mapping[str, HostArgument], step: Mapping[str, Any]) -> None:
    """Raise `UsageError` unless `step` names exactly these host-side arguments, each with a value that fits."""
    if step.keys() != host.keys():
        raise UsageError(
            f"update of {where} with {sorted(step)}",
            found=f"its host-side arguments are: {', '.join(sorted(host)) or 'none'}",
            remedy="name exactly these",
        )
    for name, value in step.items():
        reason = host[name].refuse(value)
        if reason is not None:
            raise UsageError(
                f"update of {where}, host-side argument {name!r}",
                found=reason,
                remedy="give a value of the captured type and length",
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _place(op: Any, position: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, int | str]:
    """Return where a call holds an argument; one left at its default is written out, since torch leaves it away."""
    argument = op._schema.arguments[position]
    if argument.kwarg_only:
        kwargs.setdefault(argument.name, argument.default_value)
        return kwargs, argument.name
    args.extend(given.default_value for given in op._schema.arguments[len(args) : position + 1])
    return args, position
