"""What kernels say of calls beyond their documented bounds, as the real ones' own checks would."""

from __future__ import annotations


def demand(holds: bool, what: str) -> None:
    """Raise `ValueError`, which fails the launch, unless a bound of the kernel holds."""
    if not holds:
        raise ValueError(what)
