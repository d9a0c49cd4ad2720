"""The names of quantisation schemes: what a command line is checked by, before torch is imported."""

from __future__ import annotations

import difflib
import re

from core.errors import UsageError

WEIGHT_ONLY = ("w8a16", "w4a16", "w4a16-asymmetric")
SCHEME_NAMES = ("fp8", "fp8-static", "int8", "int8-static", "int8-asymmetric", "int8-static-asymmetric", *WEIGHT_ONLY)
"""The keys of `core.quantization.scheme.SCHEMES`."""
_GROUPED = re.compile(r"(.*)-g(\d+)")


def split_name(scheme: str) -> tuple[str, int]:
    """Return the key of a scheme and the size of its groups, 0 for the scheme's own; `UsageError` for an unknown one.

    The name of a weight-only scheme may end in a group size: `w4a16-g32`.
    """
    grouped = _GROUPED.fullmatch(scheme)
    name = grouped[1] if grouped else scheme
    if name not in SCHEME_NAMES:
        close = difflib.get_close_matches(scheme, SCHEME_NAMES, 1)
        raise UsageError(
            f"quantisation scheme {scheme!r}",
            found=f"the schemes are {', '.join(SCHEME_NAMES)}",
            remedy=f"did you mean {close[0]!r}?" if close else "name one of these",
        )
    if grouped is None:
        return name, 0
    if name not in WEIGHT_ONLY or int(grouped[2]) == 0:
        raise UsageError(
            f"quantisation scheme {scheme!r}",
            found="groups of weights go with weight-only schemes, and hold at least one weight",
            remedy="name a scheme such as 'w4a16-g64' or 'w8a16-g128'",
        )
    return name, int(grouped[2])


def check_options(scheme: str | None, calibration: object, *, sensitivity: bool = False) -> None:
    """Raise `UsageError` for an unknown scheme, and for options that go with one where none is named."""
    if scheme is not None:
        split_name(scheme)
    elif calibration is not None or sensitivity:
        raise UsageError(
            "--sensitivity" if calibration is None else f"--calibration {str(calibration)!r}",
            found="nothing is quantised",
            remedy="name a scheme too, for example --quantize int8-static",
        )
