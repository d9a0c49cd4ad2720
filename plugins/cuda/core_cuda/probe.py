"""The probe of device "cuda": asks the driver library through ctypes, without torch and without a CUDA toolkit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from core.probe import Probe

_SUCCESS = 0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_LIBRARY = "libcuda.so.1"
_INSTALL_HINT = "install the NVIDIA driver, or make it visible in this container (e.g. docker run --gpus all)"


def probe(library: str = _LIBRARY, environ: Mapping[str, str] | None = None) -> Probe:
    """Ask the driver how many devices it offers to this process."""
    environ = os.environ if environ is None else environ
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return _absent(f"the NVIDIA driver library cannot be loaded: {error}", _INSTALL_HINT)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return _absent(f"CUDA_VISIBLE_DEVICES={visible!r} hides every device", "unset it, or set it to e.g. 0")
    code = driver.cuInit(0)
    if code == _NO_DEVICE:
        return _no_device(visible)
    if code != _SUCCESS:
        return _absent(
            f"the NVIDIA driver does not start: {_error_text(driver, code)}",
            "run nvidia-smi; a driver just updated needs its kernel module reloaded, or a reboot",
        )
    count = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code != _SUCCESS:
        return _absent(f"the NVIDIA driver cannot count its devices: {_error_text(driver, code)}", "run nvidia-smi")
    if count.value == 0:
        return _no_device(visible)
    return Probe(
        available=True,
        device_count=count.value,
        reason=f"{_first_name(driver)}; the driver supports CUDA {_cuda_version(driver)}",
    )


def _absent(reason: str, hint: str) -> Probe:
    return Probe(available=False, device_count=0, reason=reason, hint=hint)


def _no_device(visible: str | None) -> Probe:
    if visible is not None:
        return _absent(
            f"the driver offers no device to this process; CUDA_VISIBLE_DEVICES={visible!r}",
            "compare it with the devices that nvidia-smi -L lists",
        )
    return _absent("the driver is installed and finds no device", "run nvidia-smi -L; in a container, pass a GPU in")


def _error_text(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return f"error {code}" if text.value is None else f"{text.value.decode()} (error {code})"


def _cuda_version(driver: ctypes.CDLL) -> str:
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != _SUCCESS:
        return "of unknown version"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _first_name(driver: ctypes.CDLL) -> str:
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    known = driver.cuDeviceGet(ctypes.byref(device), 0) == _SUCCESS
    if not known or driver.cuDeviceGetName(name, len(name), device) != _SUCCESS:
        return "a device without a name"
    return name.value.decode(errors="replace")
