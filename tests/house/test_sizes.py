"""How long files are, how many lie in a folder, and how many loose at the top of core."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

from tests.house.rules import ROOT, Files, Rule, proofs, sources

MAX_LINES = 400
"""Of any file, tests included."""
MAX_CODE_LINES = 300
"""Of a file that is no test."""
LONGER: dict[str, int] = {
    "plugins/cuda/core_cuda/ops/attention/decode_kernel.py": 327,
}
"""Files that were longer when the limit was set, each with its own. A file that shrinks takes its limit along."""
_LONG = "plugins/cuda/core_cuda/ops/attention/decode_kernel.py"
"""One of them, for the proofs of these rules."""
SLACK = 10
"""Lines that a file may be below its limit in `LONGER`."""
MAX_FILES = 20
MAX_LOOSE = 12


def _is_test(path: str) -> bool:
    return "tests" in PurePosixPath(path).parts


def files_are_short(root: Path) -> list[str]:
    counts = {path: len(text.splitlines()) for path, text in sources(root)}
    return [
        f"{path} has {count} lines, allowed are {_limit(path)}"
        for path, count in counts.items()
        if count > _limit(path)
    ]


def _limit(path: str) -> int:
    return MAX_LINES if _is_test(path) else LONGER.get(path, MAX_CODE_LINES)


def limits_only_shrink(root: Path) -> list[str]:
    counts = {path: len(text.splitlines()) for path, text in sources(root)}
    return [
        f"{path} has {counts[path]} lines: "
        + (f"lower its limit of {limit}" if counts[path] > MAX_CODE_LINES else "take it out of LONGER")
        for path, limit in LONGER.items()
        if path in counts and (counts[path] <= MAX_CODE_LINES or counts[path] < limit - SLACK)
    ]


def folders_are_small(root: Path) -> list[str]:
    counts = Counter(PurePosixPath(path).parent.as_posix() for path, _ in sources(root) if not _is_test(path))
    return [f"{folder} holds {count} files" for folder, count in counts.items() if count > MAX_FILES]


def few_files_lie_loose(root: Path) -> list[str]:
    loose = [path for path, _ in sources(root, "core") if PurePosixPath(path).parent.as_posix() == "core"]
    return [f"{len(loose)} files lie at the top of core/: {', '.join(loose)}"] if len(loose) > MAX_LOOSE else []


def _files(folder: str, count: int) -> Files:
    return {f"{folder}/a{index}.py": "" for index in range(count)}


PLANTED: dict[Rule, list[Files]] = {
    files_are_short: [
        {"tests/a.py": "x = 1\n" * (MAX_LINES + 1)},
        {"tools/a.py": "x = 1\n" * (MAX_CODE_LINES + 1)},
        {"plugins/x/core_x/a.py": "x = 1\n" * (MAX_CODE_LINES + 1)},
        {_LONG: "x = 1\n" * (LONGER[_LONG] + 1)},
    ],
    limits_only_shrink: [
        {_LONG: "x = 1\n" * MAX_CODE_LINES},
        {_LONG: "x = 1\n" * (LONGER[_LONG] - SLACK - 1)},
    ],
    folders_are_small: [_files("core/x", MAX_FILES + 1), _files("plugins/x/core_x", MAX_FILES + 1)],
    few_files_lie_loose: [_files("core", MAX_LOOSE + 1)],
}
INNOCENT: dict[Rule, list[Files]] = {
    files_are_short: [
        {"tests/a.py": "x = 1\n" * MAX_LINES, "core/a.py": "x = 1\n" * MAX_CODE_LINES},
        {_LONG: "x = 1\n" * LONGER[_LONG]},
    ],
    limits_only_shrink: [{_LONG: "x = 1\n" * (LONGER[_LONG] - SLACK)}],
    folders_are_small: [_files("core/x", MAX_FILES), _files("tests/x", MAX_FILES + 1)],
    few_files_lie_loose: [_files("core", MAX_LOOSE), _files("core/x", MAX_LOOSE + 1)],
}

test_this_tree_keeps_the_rule, test_a_planted_violation_is_found, test_the_innocent_pass = proofs(PLANTED, INNOCENT)


@pytest.mark.parametrize("path", LONGER)
def test_each_longer_file_is_there(path: str) -> None:
    assert (ROOT / path).is_file()
