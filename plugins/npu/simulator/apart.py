"""Runs programs under the simulated runtime in processes of their own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys

from simulator import launch

__all__ = ["run"]


def run(program: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program under the simulated runtime in a process of its own."""
    command = [sys.executable, launch.__file__, *options, "--", sys.executable, "-c", program]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
