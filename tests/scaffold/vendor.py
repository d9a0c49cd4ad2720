"""A vendor's package as `core new-plugin` writes it, installed beside `core` in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Vendor:
    """A new package, and a folder with the wheels of `core` and of it unpacked, which stands first on sys.path."""

    project: Path
    site: Path

    def run(self, *arguments: str, timeout_s: float = 500, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m` in the package's folder, with nothing of this process's Python or plugin settings.

        settings: environment variables to set besides.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CORE_"))}
        env |= {"PYTHONPATH": str(self.site), "CORE_PROBE_TIMEOUT_S": "20", "PYTHONDONTWRITEBYTECODE": "1"} | settings
        cwd = self.project if self.project.exists() else self.project.parent
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)

    def install(self, project: Path) -> None:
        """Build the wheel of a project and unpack it, as pip does."""
        command = ["pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
        self.check(*command, "--target", str(self.site), str(project))

    def check(self, *arguments: str, timeout_s: float = 500, **settings: str) -> str:
        """Run `python -m`, which has to succeed, and return what it prints."""
        done = self.run(*arguments, timeout_s=timeout_s, **settings)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout
