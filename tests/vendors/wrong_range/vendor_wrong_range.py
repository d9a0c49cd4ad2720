"""Must never be imported: its required range of `core` excludes every version there is."""

from __future__ import annotations

raise AssertionError("imported although its range of core does not fit")
