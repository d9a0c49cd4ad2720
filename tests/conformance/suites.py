"""Suites of a few small cases, as modules that worker processes can import."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from core_conformance.outcome import Outcome
from core_conformance.runner.protocol import SuiteModules

_NUMBERS = itertools.count()

HEAD = """
import ctypes, os, signal, subprocess, sys, threading, time
import torch
from core_conformance.case import Case
from core_conformance.trial import NotSupported, Skip

def case(id, run=lambda trial: None, **fields):
    return Case(id=id, what=f"shows {id}", run=run, **fields)

def told(trial):
    trial.note(f"pid {os.getpid()}")
    trial.note(f"start {time.monotonic()}")

CASES = (case("host/one", told),)

def collect(device, profile):
    return ()
"""

InstallSuite = Callable[[str], SuiteModules]


def write_suite(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> SuiteModules:
    """Write a suite's module, its source put after `HEAD`, where this process and its workers find it."""
    name = f"fake_suite_{next(_NUMBERS)}"
    (folder / f"{name}.py").write_text(HEAD + textwrap.dedent(source))
    if str(folder) not in sys.path:
        monkeypatch.syspath_prepend(str(folder))
    return SuiteModules(host=name, collectors=(name,))


def noted(outcome: Outcome, name: str) -> str:
    """Return what a case has noted under a name."""
    (value,) = [note.partition(" ")[2] for note in outcome.notes if note.startswith(f"{name} ")]
    return value
