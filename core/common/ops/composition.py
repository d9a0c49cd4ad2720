"""Ops made of two others, the second on the first one's result: schema, reference and fake follow from theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from core.common.ops.declaration import Calls, CanonicalOp


class Signature(NamedTuple):
    """The parts of a schema: each argument and each result in its own spelling."""

    positional: Sequence[str]
    keywords: Sequence[str]
    results: Sequence[str]

    @classmethod
    def of(cls, op: CanonicalOp) -> Signature:
        """Take an op's schema apart."""
        arguments, results = op.schema.removeprefix(f"{op.name}(").split(") -> ")
        positional, _, keywords = arguments.partition("*, ")
        return cls(positional.removesuffix(", ").split(", "), _listed(keywords), results.strip("()").split(", "))

    def schema(self, name: str) -> str:
        """Return the schema of an op of that name."""
        star = ["*"] if self.keywords else []
        results = ", ".join(self.results)
        results = results if len(self.results) == 1 else f"({results})"
        return f"{name}({', '.join([*self.positional, *star, *self.keywords])}) -> {results}"


def _listed(arguments: str) -> list[str]:
    return arguments.split(", ") if arguments else []


def _each(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def followed(first: CanonicalOp, second: CanonicalOp, calls: Calls, seed: int = 0) -> CanonicalOp:
    """Return the op that applies `second` to the first result of `first`; it returns `second`'s results, then the other
    results of `first`.

    It takes the positional arguments of `first`, then those of `second` except the intermediate result, and the
    keywords of both, under their own names. The result in between is rounded as `first` rounds it.
    """
    one, two = Signature.of(first), Signature.of(second)
    names = [keyword.partition("=")[0].split()[-1] for keyword in two.keywords]
    whole = Signature(
        [*one.positional, *two.positional[1:]], [*two.keywords, *one.keywords], [*two.results, *one.results[1:]]
    )

    def joined(start: Callable[..., Any], end: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: Any, **options: Any) -> Any:
            own = {name: options.pop(name) for name in names if name in options}
            result, *others = _each(start(*operands[: len(one.positional)], **options))
            ended = _each(end(result, *operands[len(one.positional) :], **own))
            return (*ended, *others) if len(whole.results) > 1 else ended[0]

        return run

    return CanonicalOp(
        schema=whole.schema(f"{first.name}_{second.name}"),
        reference=joined(first.reference, second.reference),
        fake=joined(first.fake, second.fake),
        calls=calls,
        seed=seed,
        break_point=first.break_point,
        eager=None if first.eager is None else joined(first.eager, second.reference),
        indices=first.indices,
        first=first,
    )
