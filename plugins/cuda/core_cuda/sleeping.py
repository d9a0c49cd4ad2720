"""GPU memory that can be given back while its addresses stay, by the driver's virtual memory management.

An address range is reserved once; physical memory is created, mapped there and unmapped. The calls are those of the
CUDA Driver API, section "Virtual Memory Management". Tested on a stand-in for the driver; not run on a GPU so far.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import Any

import torch
from torch import Tensor

_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_ALIGNMENT = 512
"""Of each tensor, in bytes: what torch's own allocator keeps to."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", _Location),
        ("win32_handle_meta_data", c_void_p),
        ("alloc_flags", _AllocFlags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class Driver:
    """The few calls of libcuda, for one GPU."""

    def __init__(self, index: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        place = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=place)
        self._access = _Access(place, _READ_WRITE)
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), c_int(0))
        #: Sizes of physical memory are multiples of it, in bytes.
        self.granularity = granularity.value

    def reserve(self, num_bytes: int) -> int:
        """Return the begin of a range of addresses without memory."""
        address = c_ulonglong()
        self._call(
            "cuMemAddressReserve", byref(address), c_size_t(num_bytes), c_size_t(0), c_ulonglong(0), c_ulonglong(0)
        )
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """Give a range of addresses back."""
        self._call("cuMemAddressFree", c_ulonglong(address), c_size_t(num_bytes))

    def map(self, address: int, num_bytes: int) -> int:
        """Create memory, map it at a reserved address, and return its handle; raise `torch.OutOfMemoryError`."""
        handle, size = c_ulonglong(), c_size_t(num_bytes)
        self._call("cuMemCreate", byref(handle), size, byref(self._properties), c_ulonglong(0))
        try:
            self._call("cuMemMap", c_ulonglong(address), size, c_size_t(0), handle, c_ulonglong(0))
            self._call("cuMemSetAccess", c_ulonglong(address), size, byref(self._access), c_size_t(1))
        except BaseException:
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        """Take the memory from its address and give it back to the GPU."""
        self._call("cuMemUnmap", c_ulonglong(address), c_size_t(num_bytes))
        self._call("cuMemRelease", c_ulonglong(handle))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name} finds no memory on GPU {self._properties.location.id}")
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")


class _Region:
    """A range of addresses with its memory; lives as long as a tensor in it."""

    def __init__(self, driver: Driver, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_used = 0
        self._driver = driver
        self._device = device
        self._handle: int | None = None
        self.address = driver.reserve(num_bytes)
        self.map()

    def map(self) -> None:
        try:
            self._handle = self._driver.map(self.address, self.num_bytes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._handle = self._driver.map(self.address, self.num_bytes)

    def unmap(self) -> None:
        if self._handle is not None:
            self._driver.unmap(self.address, self.num_bytes, self._handle)
            self._handle = None

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "address"):
            return
        torch.cuda.synchronize(self._device)  # kernels that are queued may still read it
        self.unmap()
        self._driver.free(self.address, self.num_bytes)


class _Span:
    """Bytes of a region, as torch reads foreign GPU memory; its tensor keeps it, and it the region."""

    def __init__(self, region: _Region, address: int, num_bytes: int) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class DeviceMemory:
    """A `SleepingMemory` of one GPU: small tensors share a region, of whole pages."""

    in_host_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = Driver(device.index)
        self._regions: weakref.WeakSet[_Region] = weakref.WeakSet()
        self._last: weakref.ref[_Region] | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a tensor (num_bytes,) uint8 behind the last one, or in a region of its own."""
        size = _rounded(num_bytes, _ALIGNMENT)
        region = None if self._last is None else self._last()
        if region is None or region.num_used + size > region.num_bytes:
            region = _Region(self._driver, self._device, _rounded(size, self._driver.granularity))
            self._regions.add(region)
            self._last = weakref.ref(region)
        span = _Span(region, region.address + region.num_used, num_bytes)
        region.num_used += size
        return torch.as_tensor(span, device=self._device)

    def release(self) -> None:
        """Unmap all regions; the caller has waited for the GPU."""
        for region in self._regions:
            region.unmap()

    def restore(self) -> None:
        """Map memory at the addresses of all regions, or of none."""
        mapped: list[_Region] = []
        try:
            for region in tuple(self._regions):
                region.map()
                mapped.append(region)
        except BaseException:
            for region in mapped:
                region.unmap()
            raise


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
