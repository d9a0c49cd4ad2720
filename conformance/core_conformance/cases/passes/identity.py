"""Whether the identity of a pass tells programs apart: stable from process to process, another for other parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from core.common.passes.declaration import Pass, Scalar
from core_conformance.trial import Trial


def check_identity(trial: Trial, declared: Pass) -> None:
    """Compare a pass's uuid with that of an equal declaration, of one with other parameters, and of a new process."""
    uuid = declared.uuid()
    trial.require(replace(declared).uuid() == uuid, "two equal declarations have different uuids")
    for name, value in declared.params.items():
        other = replace(declared, params={**declared.params, name: _other(value)})
        trial.require(other.uuid() != uuid, f"the uuid is the same for {name}={value!r} and {name}={_other(value)!r}")
    elsewhere = _in_another_process(trial.name)
    if declared.name not in elsewhere:
        trial.note("the device as another process opens it has no such pass")
        return
    trial.require(elsewhere[declared.name] == uuid, "the uuid is another one in another process: no cache would hit")


def _other(value: Scalar) -> Scalar:
    if isinstance(value, bool):
        return not value
    return f"{value}'" if isinstance(value, str) else value + 1


@cache
def _in_another_process(device: str) -> Mapping[str, str]:
    """Return the uuids of a device's passes by name, from a process with another seed for its hashes."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-m", "core", "passes", "--device", device, "--json"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"`core passes --device {device} --json` fails: {done.stderr.strip()[-500:]}")
    return {each["name"]: each["uuid"] for each in json.loads(done.stdout)["passes"]}
