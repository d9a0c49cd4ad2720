"""What `make check-install` resolves and installs: sets of extras, their pins, and the Pythons that are claimed."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """Extras that go into one environment."""

    names: str
    #: Files that pin the set.
    constraints: tuple[str, ...] = ()
    #: What has to import there; empty where the set is only resolved, for the reason `why`.
    modules: tuple[str, ...] = ()
    #: Whether `core run` works there.
    run: bool = False
    why: str = ""
    #: Machines that have wheels; on others pip has to refuse the set with the words `refusal`. Empty: all.
    machines: tuple[str, ...] = ()
    refusal: str = ""
    #: Where the extras are declared.
    project: str = "."

    def is_possible(self) -> bool:
        """Tell whether wheels of this set exist for this machine."""
        return not self.machines or platform.machine() in self.machines

    def arguments(self) -> list[str]:
        """Return what `pip install` is given."""
        return [
            *(part for name in self.constraints for part in ("--constraint", name)),
            f"{self.project}[{self.names}]",
        ]


SETS = (
    Extras(
        names="hf,dev,conformance,cuda",
        constraints=("constraints.txt", "constraints-cuda.txt"),
        modules=(
            *("core", "core_cpu", "core_cuda", "core_npu", "core_conformance"),
            *("torch", "transformers", "triton", "flashinfer", "pytest", "hypothesis", "jsonschema"),
            *("fastapi", "uvicorn", "prometheus_client", "openai", "llguidance"),
        ),
        run=True,
    ),
    Extras(names="hf,serve", why="these packages are in the set above, there pinned"),
    Extras(names="hf,cuda", why="these packages are in the set above, there pinned"),
    Extras(names="hf,serve,ray", why="make test-ray installs it and serves by it"),
    Extras(
        names="hf,npu", why="torch_npu stops `import torch` without an NPU's runtime; make test-npu-sim installs it"
    ),
    Extras(
        names="ipex,conformance",
        modules=("core", "core_cpu", "core_conformance", "torch", "intel_extension_for_pytorch"),
        machines=("x86_64", "AMD64"),
        refusal="No matching distribution found for intel-extension-for-pytorch",
    ),
)


_PYTHON = "Programming Language :: Python :: "
"""What the classifiers of tested Pythons begin with; others say nothing about an install."""


def claimed() -> list[str]:
    """Return the Pythons that the project claims by its classifiers, oldest first."""
    found = [re.fullmatch(re.escape(_PYTHON) + r"(3\.\d+)", line) for line in _project()["classifiers"]]
    return [match[1] for match in found if match]


def normal(name: str) -> str:
    """Return a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(files: Iterable[str]) -> dict[str, str]:
    """Return the version that constraints files give to each package."""
    lines = [line.partition("#")[0].strip() for name in files for line in _read(name).splitlines()]
    return {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if line}


def digest() -> str:
    """Return a digest of what is asked for: the requirements and where they are built from, the pins, and the sets."""
    project, build = _project(), tomllib.loads(_read("pyproject.toml"))["build-system"]
    asked: list[Any] = [
        build,
        *(project[name] for name in ("requires-python", "dependencies", "optional-dependencies")),
        [f"{_PYTHON}{version}" for version in claimed()],
        project["scripts"],
        pins(map(str, sorted(ROOT.glob("constraints*.txt")))),
    ]
    return hashlib.sha256(json.dumps([*asked, repr(SETS)]).encode()).hexdigest()[:16]


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(_read("pyproject.toml"))["project"]
    return found


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
