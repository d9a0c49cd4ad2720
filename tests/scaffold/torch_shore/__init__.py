"""A vendor's torch extension, for tests: it gives torch the device "shore" (shore.cpp), and warns like a real one."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import torch

torch.ops.load_library(str(Path(__file__).with_name("libshore.so")))
torch.ops.shore.register_hooks()
torch.utils.rename_privateuse1_backend("shore")


class _Current:
    """`torch.shore.device(index)`: the one device is always the current one."""

    def __init__(self, device: object) -> None:
        self.device = device

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _module() -> types.ModuleType:
    module: Any = types.ModuleType("torch.shore")
    module.device = _Current
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.manual_seed = module.manual_seed_all = torch.ops.shore.manual_seed
    module.get_rng_state = lambda device=0: torch.ops.shore.get_rng_state()
    module.set_rng_state = lambda state, device=0: torch.ops.shore.set_rng_state(state)
    return module  # type: ignore[no-any-return]


torch._register_device_module("shore", _module())
torch.utils.generate_methods_for_privateuse1_backend()
warnings.warn("shore: firmware 1.0 is older than this extension", UserWarning, stacklevel=2)


def autoload() -> None:
    """Be called by `import torch` (entry-point group `torch.backends`): importing this module did the work."""
