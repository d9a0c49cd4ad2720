"""Fails to import: its kernels were never installed."""

from __future__ import annotations

import kernels_that_nobody_installed  # noqa: F401
