"""Whether every extra installs from public wheels on each claimed Python that is here, and runs (make check-install).

First pip resolves every set of extras on every Python, where a wrong pin shows within a minute; only then are
environments made, one at a time, and removed after use. What passed is noted in .ci/installed.json, together with a
digest of the requirements: by that CI knows when the check is due again (--due).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from install_sets import ROOT, SETS, Extras, claimed, digest, normal, pins

NOTE = ROOT / ".ci" / "installed.json"
NEEDED_BYTES = 12 * 2**30
_OTHERS = ("PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_NO_INDEX", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_ASK = "import sys, venv, ensurepip; print('.'.join(map(str, sys.version_info[:3])))"
_LIST = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
_LIMIT_S = 3600
_RUN = ("run", "--device", "cpu", "--max-new-tokens", "8")


class Failed(Exception):
    """What is wrong, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Python:
    """An interpreter of a claimed version."""

    version: str
    path: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every Python that is here; return 0 only if nothing was other than expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", help="a claimed version, as 3.12; default: all that are here")
    parser.add_argument("--resolve-only", action="store_true", help="make no environment")
    parser.add_argument("--due", action="store_true", help="only say whether the check is due: exit status 0 if so")
    chosen = parser.parse_args(arguments)
    if chosen.due:
        return 0 if is_due(resolve_only=chosen.resolve_only) else 1
    asked = digest()  # files may change while this runs
    try:
        found = find_pythons(check_wanted(chosen.python))
        check(list(found.values()), resolve_only=chosen.resolve_only)
    except Failed as failure:
        print(f"check-install: FAILED: {failure}")
        return 1
    take_note(asked, {version: python.version for version, python in found.items()}, resolve_only=chosen.resolve_only)
    print("check-install: passed")
    return 0


def take_note(asked: str, found: dict[str, str], *, resolve_only: bool) -> None:
    """Note that requirements have passed on these Pythons, by claimed version; what else is noted stays."""
    note = json.loads(NOTE.read_text(encoding="utf-8")) if NOTE.exists() else {}
    passed = noted(asked, resolve_only=resolve_only)
    new = {"digest": asked, "platform": f"{platform.system()} {platform.machine()}", "pythons": passed | found}
    note = {**note, "resolved": new} if resolve_only else {**note, **new}
    NOTE.write_text(json.dumps(note, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def noted(asked: str, *, resolve_only: bool) -> dict[str, str]:
    """Return the Pythons on which the requirements of this digest have passed: by claimed version, which one it was.

    resolve_only: those too on which they were only resolved.
    """
    note = json.loads(NOTE.read_text(encoding="utf-8")) if NOTE.exists() else {}
    passed = dict(note["pythons"]) if note.get("digest") == asked else {}
    resolved = note.get("resolved", {}) if resolve_only else {}
    return {**(resolved["pythons"] if resolved.get("digest") == asked else {}), **passed}


def is_due(*, resolve_only: bool) -> bool:
    """Tell whether a Python that is here has not passed with the requirements as they are, and print why."""
    passed = noted(digest(), resolve_only=resolve_only)
    open_ = [version for version in claimed() if version not in passed]
    if not passed:
        print(f"make check-install is due: {NOTE.name} notes nothing of pyproject.toml and the constraints as they are")
    elif due := [version for version in open_ if _find(version)]:
        print(f"make check-install is due: {NOTE.name} does not note Python {', '.join(due)}")
    else:
        rest = f"; Python {', '.join(open_)} is not here" if open_ else ""
        print(f"skipped: make check-install; it passed for these requirements on {', '.join(passed.values())}{rest}")
        return False
    return True


def check_wanted(versions: list[str] | None) -> list[str]:
    """Return the versions asked for, by default all; refuse one that the project does not claim."""
    unknown = sorted(set(versions or ()) - set(claimed()))
    if unknown:
        raise Failed(f"--python {unknown[0]}: pyproject.toml claims {', '.join(claimed())}")
    return versions or claimed()


def find_pythons(versions: Sequence[str]) -> dict[str, Python]:
    """Return an interpreter for each version that is on PATH or in pyenv; say which are not, and fail if none is."""
    found = {version: python for version in versions if (python := _find(version)) is not None}
    missing = [version for version in versions if version not in found]
    if missing:
        print(f"check-install: not checked, as no usable Python {' or '.join(missing)} is on PATH or in pyenv")
    if not found:
        raise Failed(f"none of the claimed Pythons is here: {', '.join(versions)}")
    return found


def _find(version: str) -> Python | None:
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    own = [sys._base_executable] if sys.version.startswith(f"{version}.") else []  # type: ignore[attr-defined]
    named = [path for path in (shutil.which(f"python{version}"), shutil.which("python3")) if path]
    for path in [*own, *named, *(str(each) for each in sorted(pyenv.glob(f"{version}.*/bin/python")))]:
        asked = subprocess.run([path, "-c", _ASK], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.startswith(f"{version}."):
            return Python(version=asked.stdout.strip(), path=path)
    return None


def check(pythons: Sequence[Python], *, resolve_only: bool) -> None:
    """Resolve everything everywhere, then make the environments; raise `Failed` at the first surprise."""
    with tempfile.TemporaryDirectory(prefix="check-install-") as scratch:
        free = shutil.disk_usage(scratch).free
        if free < NEEDED_BYTES and not resolve_only:
            raise Failed(
                f"{scratch} has {_gib(free)} free, {_gib(NEEDED_BYTES)} are needed: set TMPDIR to another folder"
            )
        environment = public(Path(scratch))
        for python in pythons:
            environ = make_environment(python, Path(scratch) / "resolver", environment)
            call([environ, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], environment)
            for extras in SETS:
                with _said(python, extras) as say:
                    say(resolve(environ, extras, environment))
        for python in [] if resolve_only else pythons:
            for extras in (each for each in SETS if each.modules and each.is_possible()):
                with _said(python, extras) as say:
                    say(prove(python, extras, Path(scratch) / "environment", environment))


@contextmanager
def _said(python: Python, extras: Extras) -> Iterator[Callable[[str], None]]:
    """Yield what prints a line about this Python and set, which a failure names as well."""
    about = f"Python {python.version}, {extras.names}: "
    try:
        yield lambda text: print(f"check-install: {about}{text}", flush=True)
    except Failed as failure:
        raise Failed(f"{about}{failure}") from None


def public(scratch: Path) -> dict[str, str]:
    """Return an environment in which pip takes no wheel from a folder of this machine's, whatever its settings say."""
    empty = scratch / "no-wheels"
    empty.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in _OTHERS and not name.startswith("CORE_")}
    # A list in the environment replaces the one of pip's configuration files; an empty text would not count.
    return kept | {"PIP_FIND_LINKS": str(empty), "CORE_CACHE_DIR": str(scratch / "cache"), "OMP_NUM_THREADS": "1"}


def make_environment(python: Python, folder: Path, environment: Mapping[str, str]) -> str:
    """Make a virtual environment, in place of one that lies there, and return the path of its interpreter."""
    call([python.path, "-m", "venv", "--clear", str(folder)], environment)
    return str(folder / "bin" / "python")


def resolve(python: str, extras: Extras, environment: Mapping[str, str]) -> str:
    """Have pip resolve a set without installing it; raise `Failed` unless that ends as expected."""
    start = time.perf_counter()
    options = ["--dry-run", "--ignore-installed", "--progress-bar", "off", *extras.arguments()]
    done = _run([python, "-m", "pip", "install", *options], environment)
    if not extras.is_possible():
        if done.returncode == 0:
            raise Failed(f"it resolves on {platform.machine()}, which install_sets.py says it can't")
        if extras.refusal not in done.stdout:
            raise Failed(f"pip was to refuse it with {extras.refusal!r}, but says: {reason(done.stdout)}")
        return f"can't be installed on {platform.machine()}, as expected: {extras.refusal}"
    if done.returncode:
        raise Failed(f"pip can't resolve it: {reason(done.stdout)}")
    count = len(done.stdout.rpartition("Would install ")[2].split())
    rest = "" if extras.modules else f"; not installed, as {extras.why}"
    return f"{count} packages resolved in {time.perf_counter() - start:.0f} s{rest}"


def prove(python: Python, extras: Extras, folder: Path, environment: Mapping[str, str]) -> str:
    """Install a set into an environment of its own, look at what came, import and run it, and remove it all."""
    start = time.perf_counter()
    environ = make_environment(python, folder, environment)
    try:
        call([environ, "-m", "pip", "install", "--quiet", *extras.arguments()], environment)
        installed = time.perf_counter() - start
        versions = call([environ, "-c", _LIST], environment, cwd=folder).splitlines()[-1]
        compare(json.loads(versions), pins(extras.constraints))
        call([environ, "-c", f"import {', '.join(extras.modules)}"], environment, cwd=folder)
        core = str(folder / "bin" / "core")
        for command in ([core, "devices"], [core, *_RUN] if extras.run else [environ, "-c", example()]):
            call(command, environment, cwd=folder)
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file() and not each.is_symlink())
        ran = f"it imports, core devices and {'core run' if extras.run else 'the example of the README'} pass"
        return f"installed in {installed:.0f} s, {_gib(size)}; {ran}; {time.perf_counter() - start:.0f} s in all"
    finally:
        shutil.rmtree(folder)


def example() -> str:
    """Return the first program of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition("```python\n")[2].partition("```")[0]


def compare(versions: Mapping[str, str], pinned: Mapping[str, str]) -> None:
    """Raise `Failed` for a build of torch that is not public, or a package without a pin where there are pins."""
    if "+" in versions["torch"]:
        raise Failed(f"torch {versions['torch']} is no public wheel; look at pip's index-url and extra-index-url")
    loose = sorted(f"{name}=={version}" for name, version in versions.items() if pinned and normal(name) not in pinned)
    loose = [line for line in loose if line.partition("==")[0] not in ("core", "pip")]
    if loose:
        raise Failed(f"the constraints do not pin what was installed: {' '.join(loose)}")


def call(command: Sequence[str], environment: Mapping[str, str], cwd: Path = ROOT) -> str:
    """Run a command and return what it prints; raise `Failed` with the reason where it fails."""
    done = _run(command, environment, cwd)
    if done.returncode:
        shown = " ".join(command) if len(command[-1]) < 200 else f"{command[0]} -c <the example of the README>"
        raise Failed(f"`{shown}` exits with {done.returncode}: {reason(done.stdout)}")
    return done.stdout


def _run(command: Sequence[str], environment: Mapping[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"`{' '.join(command)[:200]}` takes more than {_LIMIT_S} s") from None


def reason(output: str) -> str:
    """Return what pip, or another command, says of its failure as one line: the conflict, the errors, or the end."""
    conflict = re.search(r"The conflict is caused by:\n((?:    .*\n)+)", output)
    if conflict:
        return "; ".join(line.strip() for line in conflict[1].splitlines())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return "; ".join(errors[:3] or lines[-3:]) or "it says nothing"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
