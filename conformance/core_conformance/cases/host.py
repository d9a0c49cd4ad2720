"""Level 0: whether the plugin loads, says the truth about itself, and refuses what it can't do in clear words."""

from __future__ import annotations

from core_conformance.case import Case

CASES: tuple[Case, ...] = ()
