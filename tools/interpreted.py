"""When the tests of kernels in Triton's interpreter are due: `python tools/interpreted.py --due`, `--note` after them.

They take longer than all other tests together, and depend on the kernels and on the canonical ops alone. So what they
last passed with is noted in .ci/interpreted.json, as a digest of these files; where the files are others, a job of CI
runs the tests. A note is made by `make test-interpreter`, and is committed with the change that owed it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTE = Path(".ci/interpreted.json")
FOLDERS = ("plugins/cuda", "core/common/ops")
OUTSIDE = (
    "plugins/cuda/core_cuda/plugin.py",
    "plugins/cuda/core_cuda/collective.py",
    "plugins/cuda/core_cuda/collective_linear.py",
    "plugins/cuda/core_cuda/collective_norm.py",
    "plugins/cuda/core_cuda/ops/summing.py",
    "plugins/cuda/tests/collective_linear_worker.py",
    "plugins/cuda/tests/collective_norm_worker.py",
    "plugins/cuda/tests/collective_worker.py",
    "plugins/cuda/tests/summing_worker.py",
    "plugins/cuda/tests/test_cuda_collective.py",
    "plugins/cuda/tests/test_cuda_collective_linear.py",
    "plugins/cuda/tests/test_cuda_collective_norm.py",
    "plugins/cuda/tests/test_cuda_exchange.py",
    "plugins/cuda/tests/test_cuda_plugin.py",
)
"""What needs a GPU, and what none of these tests imports."""


def digest(root: Path) -> str:
    """Return a digest of every Python file below `FOLDERS` that is not `OUTSIDE`, names included."""
    outside = {root / name for name in OUTSIDE}
    files = sorted({path for folder in FOLDERS for path in (root / folder).rglob("*.py")} - outside)
    told = [(path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def is_due(root: Path) -> bool:
    """Say whether the tests have not passed with the files as they are, and why."""
    file = root / NOTE
    passed = json.loads(file.read_text(encoding="utf-8"))["digest"] if file.is_file() else None
    if passed == digest(root):
        print(f"skipped: the tests in Triton's interpreter; {NOTE} notes that they passed with these kernels and ops")
        return False
    changed = "notes other files" if passed else "is not there"
    print(f"make test-interpreter is due: {NOTE} {changed} ({', '.join(FOLDERS)})")
    return True


def main(root: Path = ROOT) -> int:
    """Answer one of the two options; exit status 0 of --due: they are to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--due", action="store_true", help="say whether the tests are due")
    choice.add_argument("--note", action="store_true", help="note that they have passed with the files as they are")
    if parser.parse_args().due:
        return 0 if is_due(root) else 1
    (root / NOTE).write_text(json.dumps({"digest": digest(root)}) + "\n", encoding="utf-8")
    print(f"noted in {NOTE}: commit it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
