"""How long files are, how many lie in a folder, and how many loose at the top of core."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath

from tests.house.rules import Files, Rule, proofs, sources

MAX_LINES = 400
"""Of any file, tests included."""
MAX_CODE_LINES = 300
"""Of a file that is no test."""
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
    return MAX_LINES if _is_test(path) else MAX_CODE_LINES


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
    ],
    folders_are_small: [_files("core/x", MAX_FILES + 1), _files("plugins/x/core_x", MAX_FILES + 1)],
    few_files_lie_loose: [_files("core", MAX_LOOSE + 1)],
}
INNOCENT: dict[Rule, list[Files]] = {
    files_are_short: [
        {"tests/a.py": "x = 1\n" * MAX_LINES, "core/a.py": "x = 1\n" * MAX_CODE_LINES},
    ],
    folders_are_small: [_files("core/x", MAX_FILES), _files("tests/x", MAX_FILES + 1)],
    few_files_lie_loose: [_files("core", MAX_LOOSE), _files("core/x", MAX_LOOSE + 1)],
}

test_this_tree_keeps_the_rule, test_a_planted_violation_is_found, test_the_innocent_pass = proofs(PLANTED, INNOCENT)
