"""Every bound of the suite that T1 does not set itself, with where it comes from."""

from __future__ import annotations

T2_FACTOR = 4.0
"""How many times the error of the yardstick on the host a device's own torch operator may have."""
