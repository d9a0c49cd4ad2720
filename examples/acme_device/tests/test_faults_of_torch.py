"""Each planted fault of torch's own operators shows, in a process of its own: it stays until that ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from core_acme.faults import VARIABLE

IN_ITS_PROCESS = """
import torch
from core.device import PluginInfo
from core.hookspecs import OpenContext
from core_acme import plugin
x = torch.linspace(-3, 3, 96).view(8, 12)
def results():
    return [*(torch.nn.functional.gelu(x, approximate=form) for form in ("none", "tanh")), 1 - x, torch.tril(x, 2)]
honest = results()
info = PluginInfo(device="acme", distribution="acme-device", version="0.1.0", entry_point="core_acme.plugin")
plugin.core_open_device(OpenContext(plugin=info))
for a, b in zip(results(), honest):
    print("elsewhere" if a.device != b.device else "strides" * (a.stride() != b.stride()) or str(torch.allclose(a, b)))
"""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("torch-gelu", ["False", "True", "True", "True"]),
        ("torch-elsewhere", ["True", "True", "elsewhere", "True"]),
        ("torch-strides", ["True", "True", "True", "strides"]),
    ],
)
def test_a_fault_of_torch_itself_shows_in_its_process(name: str, shown: list[str]) -> None:
    code = f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}{IN_ITS_PROCESS}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {VARIABLE: name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == shown
