"""Level 0: the plugin loads, describes itself correctly, and refuses with clear errors."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from core.common.ops.declaration import declared_ops
from core.device import Capabilities
from core.errors import CoreError, DeviceUnavailableError
from core.hookspecs import DeviceContext
from core.host.discovery import discover
from core.host.loading import HOOK_NAMES, load_plugin
from core.host.probing import run_probe
from core.host.selection import select_device
from core.host.workers.worker import Asked, ask_once
from core.settings import Settings
from core_conformance.case import Case
from core_conformance.cases.host.device import DEVICE_CASES
from core_conformance.cases.host.presence import base_name, entry_of, present
from core_conformance.cases.host.sleeping import SLEEPING_CASES
from core_conformance.rules.expectations import matches
from core_conformance.runner import suite
from core_conformance.trial import NotSupported, Skip, Trial

_OPEN_TIMEOUT_S = 120.0
_AT_ONCE = 4
_MAX_OPENED = 16


def metadata(trial: Trial) -> None:
    """Check what the plugin's distribution says about itself."""
    entry = entry_of(trial)
    info = entry.info
    trial.note(f"{info} ({info.entry_point})")
    trial.require(entry.verdict == "ready", f"{info} is {entry.verdict}: {entry.reason}")
    try:
        Version(info.version)
    except InvalidVersion:
        trial.fail(f"version {info.version!r} is none by PEP 440")
    if not info.in_tree:
        # The judgement includes whether the range contains this version.
        trial.require(
            bool(info.requires_core),
            "its metadata states no range of core: add a requirement such as 'core>=0.1,<0.3' to its dependencies",
        )
        if info.requires_core and "<" not in info.requires_core and "=" not in info.requires_core.replace(">=", ""):
            trial.note(f"its range of core, {info.requires_core}, has no upper bound: a later core may break it")
    for reference in filter(None, (info.entry_point, info.probe_entry_point)):
        package = reference.partition(":")[0].strip().partition(".")[0]
        trial.require(find_spec(package) is not None, f"entry point {reference!r}: there is no module {package!r}")
    strays = [line for line in discover(Settings.from_environment()).warnings if f" of {info} " in line]
    trial.require(not strays, "; ".join(strays))


def probe(trial: Trial) -> None:
    """Run the probe and check its answer: each device that it counts opens, and no other does."""
    info = entry_of(trial).info
    if not info.probe_entry_point:
        raise NotSupported("the plugin brings no probe")
    timeout_s = Settings.from_environment().probe_timeout_s
    start = time.perf_counter()
    outcome = run_probe(info, timeout_s)
    said = outcome.probe
    if not trial.require(not outcome.failed, said.reason):
        return
    trial.note(f"answered within {time.perf_counter() - start:.1f} s of {timeout_s:g} s: {said.reason}")
    trial.require(not outcome.imported_torch, "it imports torch, which makes every listing of devices slow")
    trial.require(bool(said.reason), "it gives no reason: one sentence on what was found")
    trial.require(said.available or bool(said.hint), "it says that no device is available, and not what to do")
    _check_count(trial, said.device_count)
    if not said.available and not trial.failures:
        raise Skip(f"this machine has no such device: {said.reason}")


def _check_count(trial: Trial, count: int) -> None:
    name = base_name(trial)
    indices = [*range(min(count, _MAX_OPENED)), count]
    opened: dict[int, dict[str, Any]] = {}
    for first in range(0, len(indices), _AT_ONCE):
        with Asked() as asked:
            for index in indices[first : first + _AT_ONCE]:
                device = f"{name}:{index}"
                asked.ask(
                    str(index),
                    "core.host.doctor_worker",
                    device=device,
                    timeout_s=_OPEN_TIMEOUT_S * trial.timeout_factor,
                )
            results = asked.results()
        for key, result in results.items():
            error = {"type": "", "found": f"its process {result.problem}", "remedy": ""}
            opened[int(key)] = result.answer or {"status": "fail", "error": error}
    for index in indices[:-1]:
        answer = opened[index]
        found = "" if answer["status"] == "pass" else answer["error"]["found"]
        trial.require(not found, f"the probe counts {count}, and {name}:{index} does not open: {found}")
    answer = opened[count]
    if trial.require(answer["status"] != "pass", f"the probe counts {count}, and {name}:{count} opens too"):
        _check_refusal(trial, f"{name}:{count}, one more than the probe counts", answer["error"])


def _check_refusal(trial: Trial, what: str, error: dict[str, Any]) -> None:
    kind = error["type"]
    wanted = (DeviceUnavailableError.__name__, "UnknownDeviceError")
    trial.require(
        kind in wanted,
        f"{what}: core_open_device raises {kind or 'nothing'} instead of DeviceUnavailableError: {error['found']}",
    )
    for part in ("found", "remedy"):
        trial.require(bool(str(error[part]).strip()), f"{what}: the error has no {part!r}")


def importing(trial: Trial) -> None:
    """Import the plugin and open the device in a fresh process, and see what that changes for everyone else."""
    entry_of(trial)
    worker = "core_conformance.runner.import_worker"
    result = ask_once(worker, {"device": trial.name}, timeout_s=_OPEN_TIMEOUT_S * trial.timeout_factor)
    if result.answer is None or "problem" in result.answer:
        problem = f"its process {result.problem}" if result.answer is None else result.answer["problem"]
        trial.fail(f"importing it: {problem}\n{result.output}".strip())
        return
    answer = result.answer
    trial.note(f"importing it takes {answer['imported_s']:.2f} s, opening the device {answer['opened_s']:.2f} s")
    for when, key in (("importing the plugin", "on_import"), ("opening the device", "on_open")):
        trial.fail(*(f"{when} changes torch for the whole process: {change}" for change in answer[key]))


def opening(trial: Trial) -> None:
    """Open the device twice: both times it is the same one, with capabilities that make sense."""
    first = present(trial)
    second = select_device(trial.name)
    trial.note(str(first))
    for name in ("torch_device", "capabilities"):
        a, b = getattr(first.parts, name), getattr(second.parts, name)
        trial.require(a == b, f"opened again, its {name} is {b} instead of {a}")
    names = [[item.name for item in getattr(device, kind)] for kind in ("passes", "ops") for device in (first, second)]
    trial.require(names[0] == names[1] and names[2] == names[3], "opened again, it registers other passes or ops")
    _check_capabilities(trial, first.capabilities)


def _check_capabilities(trial: Trial, capabilities: Capabilities) -> None:
    trial.require(bool(capabilities.device_name.strip()), "its capabilities have no device_name")
    trial.require(bool(capabilities.dtypes), "it declares no dtype to compute in")
    odd = [str(d) for d in capabilities.dtypes if not isinstance(d, torch.dtype) or not d.is_floating_point]
    trial.require(not odd, f"it declares {', '.join(sorted(odd))} among its floating dtypes")
    plain = [name for name, value in capabilities.extra.items() if not isinstance(value, str | int | float | bool)]
    trial.require(not plain, f"extra {', '.join(map(repr, plain))} is neither text nor number nor bool")
    bare = [name for name, reason in capabilities.unprofitable.items() if not str(reason).strip()]
    trial.require(not bare, f"unprofitable passes without a reason: {', '.join(map(repr, bare))}")


def hooks(trial: Trial) -> None:
    """Call every hook that the plugin implements; each gives what the contract says."""
    device = present(trial)
    loaded = load_plugin(device.plugin)
    context = DeviceContext(plugin=device.plugin, parts=device.parts)
    implemented = [hook for hook in HOOK_NAMES if loaded.implements(hook)]
    trial.note(f"implements {', '.join(implemented)}")
    for hook in implemented:
        if hook == "core_open_device":
            continue  # the case `opening` calls this hook
        try:
            loaded.call(hook, context)
        except CoreError as error:
            trial.fail(error.found)
    unknown = sorted({item.op for item in device.ops} - declared_ops().keys())
    trial.require(not unknown, f"it implements ops that are no canonical ones: {', '.join(unknown)}")
    trial.require(
        device.graph_backend() is not device.graph_backend(),
        "core_graph_backend gives the same backend again: each program needs one of its own",
    )


def profile(trial: Trial) -> None:
    """Check what the plugin declares for this suite: each glob names a case, each item says why, each op exists."""
    device = present(trial)
    declared = trial.profile
    ids = [case.id for case in suite.collect(device, declared, fuzz=True)]
    for glob, reason in declared.not_supported.items():
        trial.require(isinstance(reason, str) and bool(reason.strip()), f"not_supported[{glob!r}] gives no reason")
        named = [id for id in ids if matches(glob, id)]
        if trial.require(bool(named), f"not_supported[{glob!r}] names no case: remove or correct it"):
            trial.note(f"{glob} leaves out {len(named)} of {len(ids)} cases: {reason}")
    for name in sorted(declared.nondeterministic_ops):
        namespace, _, op = name.partition("::")
        known = bool(op) and hasattr(getattr(torch.ops, namespace), op)
        trial.require(known, f"nondeterministic_ops has {name!r}, which is no op of torch here")


def collecting(trial: Trial) -> None:
    """Collect the cases of all levels, which asks the device for little more than its declarations."""
    device = present(trial)
    start = time.perf_counter()
    cases = suite.collect(device, trial.profile)
    trial.note(f"{len(cases)} cases, collected in {time.perf_counter() - start:.1f} s")


def _case(name: str, what: str, run: Any, timeout_s: float = 120.0, *, opens: bool = True) -> Case:
    return Case(id=f"host/{name}", what=what, run=run, timeout_s=timeout_s, opens=opens)


CASES: tuple[Case, ...] = (
    _case(
        "metadata",
        "the distribution's metadata are whole, and its range of core contains this one",
        metadata,
        opens=False,
    ),
    _case("probe", "the probe is quick and true: what it counts opens, and nothing else", probe, timeout_s=900.0),
    _case("import", "importing and opening change nothing of torch's for the process", importing, timeout_s=180.0),
    _case("open", "opening twice gives the same device", opening),
    _case("hooks", "each hook returns what the contract says", hooks),
    _case("profile", "what is declared not to be supported names cases and says why", profile),
    _case("collect", "the cases of all levels can be collected", collecting),
    *DEVICE_CASES,
    *SLEEPING_CASES,
)
