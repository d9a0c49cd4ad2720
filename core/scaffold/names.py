"""The names of a new vendor package, chosen and checked before anything is written."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from core._version import __version__
from core.errors import UsageError
from core.host.discovery import Discovery
from core.host.plugin_metadata import HOST_DISTRIBUTION, name_defect
from core.settings import normalize

MAX_NAME, MAX_PACKAGE, MAX_VENDOR = 24, 32, 60
# The package's name is also the namespace of its ops, and these are torch's.
_TAKEN_NAMESPACES = ("aten", "prim", "prims", "quantized", "mkldnn")
# Quotes would have to be escaped, in each of the formats that the name is written to in its own way.
_VENDOR = re.compile(r"[^\"'\\\x00-\x1f\x7f`<>{}|]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What a new package calls things."""

    #: What users write after `--device`.
    device: str
    #: The import package, and the namespace of its ops.
    package: str
    #: What pip calls it.
    distribution: str
    #: What names of passes begin with.
    prefix: str
    #: The device's name for people to read.
    title: str
    vendor: str
    #: The range of `core` versions that the package accepts.
    requires_core: str
    core_version: str = __version__
    #: The type of torch's accelerator that the plugin opens; "" for a simulation on the processor.
    torch_device: str = ""


def choose_names(
    device: str, installed: Discovery, *, package: str = "", vendor: str = "", torch_device: str = ""
) -> Names:
    """Return all names for a device name; raise `UsageError` for one that cannot be used, or is taken here.

    - package, vendor: where not given, made from the device name.
    - torch_device: a type of torch's accelerator, to start from; whether torch has it here is not asked.
    """
    _check_device(device, installed)
    words = [word for word in re.split(r"[-_]+", device) if word]
    title = " ".join(word[0].upper() + word[1:] for word in words)
    prefix = "_".join(words).lower()
    names = Names(
        device=device,
        package=package or f"core_{prefix}",
        distribution=f"{'-'.join(words).lower()}-device",
        prefix=prefix,
        title=title,
        vendor=vendor.strip() or title,
        requires_core=range_of(__version__),
        torch_device=torch_device,
    )
    if torch_device and not torch_device.isidentifier():
        raise UsageError(
            f"--torch-device {torch_device!r}",
            found="not a device type of torch, which is a word of letters, digits and '_'",
            remedy="name a type without an index, as torch.accelerator.current_accelerator() prints it",
        )
    _check_package(names.package)
    _check_distribution(names.distribution)
    if not _VENDOR.fullmatch(names.vendor) or not names.vendor.isprintable() or len(names.vendor) > MAX_VENDOR:
        raise UsageError(
            f"--vendor {vendor!r}",
            found="it holds a quote, a bracket or another mark that files cannot quote as it is"
            if len(names.vendor) <= MAX_VENDOR
            else f"it has {len(names.vendor)} characters",
            remedy=f"give the vendor's name as plain words, of at most {MAX_VENDOR} characters",
        )
    return names


def range_of(core_version: str) -> str:
    """Return the range of `core` versions that a package made by this one may expect to work with."""
    major, minor = (int(part) for part in core_version.split(".")[:2])
    # What one minor version (from 1.0 on, major version) promises, the next one keeps: docs/releasing.md.
    return f">={major}.{minor},<{major}.{minor + 2}" if major == 0 else f">={major}.{minor},<{major + 2}"


def _check_device(device: str, installed: Discovery) -> None:
    asked = f"a plugin for device {device!r}"
    choose = "choose another name: it is what users write after --device"
    defect = name_defect(device)
    if not defect and normalize(device) == HOST_DISTRIBUTION:
        defect = f"device name {device!r} is that of {HOST_DISTRIBUTION} itself"
    if not defect and len(device) > MAX_NAME:
        defect = f"it has {len(device)} characters, and at most {MAX_NAME} fit"
    if defect:
        raise UsageError(asked, found=defect, remedy=choose)
    # CORE_PLUGINS and CORE_PLUGINS_DISABLE do not tell such names apart either.
    for entry in installed.entries:
        if normalize(entry.info.device) == normalize(device):
            found = f"device {entry.info.device!r} is installed here: {entry.info} ({entry.info.entry_point})"
            raise UsageError(asked, found=found, remedy=choose)


def _check_package(package: str) -> None:
    defect = ""
    if not package.isascii() or not package.isidentifier() or keyword.iskeyword(package):
        defect = "it is no name that Python can import"
    elif package.startswith("_") or len(package) > MAX_PACKAGE:
        defect = f"it begins with '_', or is longer than {MAX_PACKAGE} characters"
    elif package in _TAKEN_NAMESPACES:
        defect = "torch has ops of that namespace"
    elif package in sys.stdlib_module_names or package in sys.modules or find_spec(package) is not None:
        defect = "a module of that name is installed here, and one would hide the other"
    if defect:
        remedy = "choose another one with --package, like core_mydevice"
        raise UsageError(f"the import package {package!r}", found=defect, remedy=remedy)


def _check_distribution(distribution: str) -> None:
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return
    raise UsageError(
        f"the distribution {distribution!r}",
        found=f"version {found} of it is installed here",
        remedy=f"uninstall it (pip uninstall {distribution}), or choose another device name",
    )
