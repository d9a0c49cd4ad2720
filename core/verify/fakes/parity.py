"""One call of an op on real and on fake tensors: how they differ from each other and from the schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from core.common.fakes.schema import mutated, shared
from core.verify.execution import Copies, error_line
from core.verify.fakes.memory import memory, overlap, same_bits, whole

Sharing = tuple[frozenset[tuple[int, str]], frozenset[tuple[int, int]]]
"""Pairs of a result and an argument that share memory, and pairs of results that do."""


class CallRefused(Exception):
    """The real kernel raised: the call says nothing about the fake."""


def compare(op: OpOverload, kwargs: Mapping[str, Any], synchronize: Callable[[], None] = lambda: None) -> list[str]:
    """Run an op on real tensors and on fake ones and return the differences, one line each.

    Compared are number, shape, dtype, strides and device of the results, which arguments are written, and what shares
    memory. Raises `CallRefused` if the real kernel raises.

    - kwargs: every argument by its name in the schema; nothing is written into them.
    - synchronize: waits for the device.
    """
    copies = Copies()
    after = {name: pytree.tree_map(copies.of, value) for name, value in kwargs.items()}
    try:
        with torch.no_grad():
            results = leaves(_call(op, after))
        synchronize()
    except Exception as error:
        raise CallRefused(error_line(error)) from error
    written = _writes(mutated(op._schema), kwargs, after)
    try:
        fakes, given = run_fake(op, kwargs)
    except Exception as error:
        return [*written, f"runs on real tensors and raises on fake ones: {error_line(error)}"]
    if len(results) != len(fakes):
        return [*written, f"the kernel gives {len(results)} results, the fake {len(fakes)}"]
    problems = [_metadata(number, *pair) for number, pair in enumerate(zip(results, fakes, strict=True))]
    aliases = alias_problems(
        sharing(results, after), sharing(fakes, given), shared(op._schema, len(results)), fake_decides=True
    )
    return [*filter(None, problems), *written, *aliases]


def run_fake(op: OpOverload, kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what an op gives on fake forms of these arguments, and these forms."""
    # With a ShapeEnv, so that an op whose sizes depend on values can say so.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = pytree.tree_map_only(Tensor, lambda leaf: mode.from_tensor(leaf, static_shapes=True), dict(kwargs))
    with torch.no_grad(), mode:
        return leaves(_call(op, given)), given


def leaves(result: Any) -> list[Any]:
    """Return a result's values in order; nothing for None."""
    return [] if result is None else list(pytree.tree_leaves(result))


def sharing(results: Sequence[Any], arguments: Mapping[str, Any]) -> Sharing:
    """Return which results of a call share memory with arguments or with each other."""
    tensors = [(number, result) for number, result in enumerate(results) if isinstance(result, Tensor)]
    given = [(name, leaf) for name, value in arguments.items() for leaf in pytree.tree_leaves(value)]
    with_arguments = frozenset(
        (number, name)
        for number, result in tensors
        for name, leaf in given
        if isinstance(leaf, Tensor) and overlap(result, leaf)
    )
    between = frozenset(
        (other, number)
        for index, (number, result) in enumerate(tensors)
        for other, second in tensors[:index]
        if overlap(result, second)
    )
    return with_arguments, between


def alias_problems(
    real: Sharing, fake: Sharing, declared: Collection[tuple[int, str]], *, fake_decides: bool
) -> list[str]:
    """Say where results share memory against the schema, or otherwise than the fake's do.

    - declared: pairs of a result and an argument that may share.
    - fake_decides: results may share memory with each other where the fake's results do, which no schema can say;
      otherwise no results may.
    """
    problems = [f"result {n} shares memory with argument {name!r}" for n, name in sorted(real[0] - set(declared))]
    problems += [
        f"result {n} shares memory with argument {name!r}, and the fake's does not"
        for n, name in sorted((real[0] & set(declared)) - fake[0])
    ]
    problems += [
        f"the fake's result {n} shares memory with argument {name!r}, and the kernel's does not"
        for n, name in sorted(fake[0] - real[0])
    ]
    allowed = fake[1] if fake_decides else frozenset()
    problems += [f"results {one} and {other} share memory" for one, other in sorted(real[1] - allowed)]
    missing = sorted(fake[1] - real[1])
    return problems + [f"the fake's results {a} and {b} share memory, and the kernel's do not" for a, b in missing]


def _call(op: OpOverload, kwargs: Mapping[str, Any]) -> Any:
    arguments = [each for each in op._schema.arguments if each.name in kwargs]
    positional: list[Any] = []
    for each in op._schema.arguments:
        if each.kwarg_only or each.name not in kwargs:
            break
        positional.append(kwargs[each.name])
    return op(*positional, **{each.name: kwargs[each.name] for each in arguments[len(positional) :]})


def _writes(declared: Collection[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name the arguments outside `declared` whose memory no longer holds the bits it held before the call."""

    def tensors(value: Any) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]

    may_change = {memory(leaf) for name in declared for leaf in tensors(after.get(name))}
    return [
        f"writes its argument {name!r}, which the schema does not declare"
        for name, value in after.items()
        if any(
            memory(leaf) not in may_change and not same_bits(whole(leaf), whole(old))
            for leaf, old in zip(tensors(value), tensors(before[name]), strict=True)
        )
    ]


def _metadata(number: int, result: Any, fake: Any) -> str:
    """Say how a result differs from the fake's; "" if it does not."""
    if not isinstance(result, Tensor) or not isinstance(fake, Tensor):
        symbolic = isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool)
        same = symbolic or (type(result) is type(fake) and result == fake)
        return "" if same else f"result {number} is {result!r}, and the fake says {fake!r}"
    for what, is_so, said in (
        ("device", result.device, fake.device),
        ("dtype", described(result.dtype), described(fake.dtype)),
        ("shape", _listed(result.shape), _listed(fake.shape)),
        ("strides", _listed(result.stride()), _listed(fake.stride())),
    ):
        same = _same(result, fake) if what in ("shape", "strides") else is_so == said
        if not same and is_so != said:
            return f"result {number} has {what} {is_so}, and the fake says {said}"
    return ""


def _same(result: Tensor, fake: Tensor) -> bool:
    """Tell whether shape and strides are the same, as far as the fake can know them."""
    if result.dim() != fake.dim():
        return False
    # A size that only a run can tell is symbolic in the fake, and says nothing about strides either.
    known = all(isinstance(n, int) for n in fake.shape)
    if any(isinstance(n, int) and n != m for n, m in zip(fake.shape, result.shape, strict=True)):
        return False
    if not known or not result.numel():
        return True
    # A dimension of one has no stride that anything could read.
    return all(a == b for a, b, n in zip(result.stride(), fake.stride(), result.shape, strict=True) if n > 1)


def _listed(numbers: Sequence[Any]) -> str:
    return f"({', '.join(map(str, numbers))})"


def described(value: Any) -> str:
    """Return a tensor's dtype, shape and, where they are not those of contiguous rows, strides; else the value."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    if not isinstance(value, Tensor):
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)
    strides = "" if value.is_contiguous() else f" strides {_listed(value.stride())}"
    return f"{described(value.dtype)} {_listed(value.shape)}{strides}"
