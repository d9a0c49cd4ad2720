"""Run a command under the simulated ACL runtime, building it first where needed.

usage: python plugins/npu/simulator/launch.py [--devices N] [--schedule eager|lazy] [--poison] -- command…
       python plugins/npu/simulator/launch.py --check    (build only; status 3 with the reason where it is impossible)

The command's Python must be the one that runs this file: the libraries are made for its torch_npu.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

PLUGIN = Path(__file__).resolve().parents[1]
CANNOT_BUILD = 3


def environment(libraries: Path, devices: int = 1) -> dict[str, str]:
    """Return the variables of a process that finds the simulated runtime in `libraries`, with `devices` devices."""

    def prepend(folder: Path, variable: str) -> str:
        return os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])

    return {
        "LD_LIBRARY_PATH": prepend(libraries, "LD_LIBRARY_PATH"),
        "PYTHONPATH": prepend(PLUGIN, "PYTHONPATH"),
        "ASCEND_HOME_PATH": str(libraries),
        "ASCEND_OPP_PATH": str(libraries / "opp"),
        "ASCEND_SIM_DEVICES": str(devices),
        "ASCEND_SIM_KERNELS": "simulator.kernels",
        # One thread, unless the caller says otherwise: with a queue, ops would be issued from another one, and errors
        # would appear at later ops.
        "TASK_QUEUE_ENABLE": os.environ.get("TASK_QUEUE_ENABLE", "0"),
        # torch_npu refuses a process whose torch sees another accelerator.
        "CUDA_VISIBLE_DEVICES": "",
        "CORE_NPU_SIMULATED": "1",
    }


def main(arguments: list[str]) -> int:
    """Build, then replace this process by the command."""
    parser = argparse.ArgumentParser(description="Run a command under the simulated ACL runtime.")
    parser.add_argument("--devices", type=int, default=1, help="how many devices there are (default 1)")
    schedules = ["eager", "lazy"]
    parser.add_argument("--schedule", choices=schedules, default="eager", help="when tasks run (csrc/tasks.c)")
    parser.add_argument("--poison", action="store_true", help="fill new and freed memory with NaN")
    parser.add_argument("--permissive", action="store_true", help="let kernels without a handler pass, uncomputed")
    parser.add_argument("--check", action="store_true", help="build only")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(arguments)
    # As a script, this file's folder would come first on the path and hide modules behind its neighbours' names.
    sys.path[0] = str(PLUGIN)
    from simulator.build import BuildError, build

    try:
        libraries = build()
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT_BUILD
    if options.check:
        sys.stdout.write(f"{libraries}\n")
        return 0
    if not options.command:
        parser.error("no command given after --")
    os.environ.update(environment(libraries, options.devices))
    os.environ["ASCEND_SIM_SCHEDULE"] = options.schedule
    os.environ["ASCEND_SIM_POISON"] = str(int(options.poison))
    os.environ["ASCEND_SIM_STRICT"] = str(int(not options.permissive))
    sys.stdout.flush()
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
