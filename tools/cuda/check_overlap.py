"""Check in the compiled kernels that those which overlap wait before they touch what others write; no GPU is needed.

    python tools/cuda/check_overlap.py [--capability 90] [FILE.py …]

FILE: calls of ops, as compile_cuda_kernels.py takes them; by default those that the tests compile. The rule is that of
`core_cuda/ops/launching.py`. Prints what each kernel reads before it waits, and why it may; exits with 1 for a fault.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from compile_cuda_kernels import compile_calls

CALLS = Path(__file__).resolve().parents[2] / "plugins/cuda/tests/support"


def main() -> int:
    """Compile, check, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("files", type=Path, nargs="*")
    options = parser.parse_args()
    times: Counter[str] = Counter()
    early: dict[str, dict[str, str]] = {}
    wrong = 0

    def tell(told: dict[str, Any]) -> None:
        nonlocal wrong
        if "error" in told:
            wrong += 1
            print(f"{told['call']!r} does not compile: {told['error']}", flush=True)
        if "faults" not in told:
            return  # it does not overlap
        times[told["kernel"]] += 1
        early.setdefault(told["kernel"], {}).update(told["early"])
        for fault in told["faults"]:
            wrong += 1
            print(f"{told['kernel']} of {told['call']!r}: {fault}", flush=True)

    for file in options.files or sorted(CALLS.glob("calls_*.py")):
        compile_calls([file], [], options.capability, tell)
    for kernel, count in sorted(times.items()):
        print(f"{kernel}: compiled in {count} ways, reads {', '.join(early[kernel]) or 'nothing'} before its wait")
        for name, why in early[kernel].items():
            print(f"    {name}: {why}")
    print(f"{wrong} faults in {sum(times.values())} compiled kernels")
    return int(wrong > 0 or not times)


if __name__ == "__main__":
    raise SystemExit(main())
