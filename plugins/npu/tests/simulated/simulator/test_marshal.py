"""Arguments of launches, read back from the objects that torch_npu makes, and what a specification refuses."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import simulator.kernels  # registers all of them
from simulator import atb, marshal, runtime
from simulator.library import library


def made(function: str, *arguments: Any) -> int:
    """Call one of the runtime's functions that create objects, and return the object's address."""
    create = getattr(library(), function)
    create.restype = ctypes.c_void_p
    return int(create(*arguments))


def test_importing_the_kernels_imports_the_modules_of_every_family() -> None:
    folder = Path(simulator.kernels.__file__).parent
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py") if path.stem != "__init__"]
    assert len({file.parent for file in files}) > 1, "families have folders"
    assert [file for file in files if ".".join(("simulator.kernels", *file.parts)) not in sys.modules] == []


def test_every_kind_of_argument_is_read_as_it_was_given() -> None:
    ints = (ctypes.c_int64 * 3)(4, -5, 6)
    bools = (ctypes.c_bool * 2)(True, False)
    floats = (ctypes.c_float * 2)(0.5, -2.0)
    memory = torch.arange(6, dtype=torch.float32)
    shape, strides = (ctypes.c_int64 * 2)(3, 2), (ctypes.c_int64 * 2)(1, 3)
    two = ctypes.c_uint64(2)
    tensor = made("aclCreateTensor", shape, two, 0, strides, 0, 2, shape, two, ctypes.c_void_p(memory.data_ptr()))
    number = ctypes.c_float(1.25)
    scalar = made("aclCreateScalar", ctypes.byref(number), 0)
    pair = (ctypes.c_void_p * 2)(tensor, None)
    text = ctypes.create_string_buffer(b"BNSD")
    narrow = 0x7F00000000000000  # a narrow argument shares its register with whatever was there before
    words = [
        tensor,
        made("aclCreateTensorList", pair, 2),
        scalar,
        made("aclCreateScalarList", (ctypes.c_void_p * 1)(scalar), 1),
        made("aclCreateIntArray", ints, 3),
        made("aclCreateBoolArray", bools, 2),
        made("aclCreateFloatArray", floats, 2),
        ctypes.addressof(text),
        -7,
        narrow | 0xFFFFFFFE,
        narrow | 0xFD,
        narrow | 1,
        0,
    ]
    packed = ctypes.c_double.from_buffer_copy(bytes(number) + bytes(4))  # a float fills half of its register
    read = marshal.arguments("TLSZABRCIDihbFT", words, [2.5, packed.value])
    assert torch.equal(read[0], memory.view(2, 3).t())
    assert torch.equal(read[1][0], read[0])
    assert read[1][1] is None
    assert read[2:] == [1.25, [1.25], [4, -5, 6], [True, False], [0.5, -2.0], "BNSD", -7, 2.5, -2, -3, True, 1.25, None]


def test_a_struct_of_parameters_is_read_as_bytes() -> None:
    param = atb.Rope(coefficient=64)
    create = library().sim_create_list
    create.restype = ctypes.c_void_p
    magic = 0x5E4501 + "TSABRLZP".index("P")
    address = create(magic, ctypes.byref(param), ctypes.c_uint64(ctypes.sizeof(param)), ctypes.c_size_t(1))
    (given,) = marshal.arguments("P", [address], [])
    assert atb.read(atb.Rope, given).coefficient == 64
    with pytest.raises(ValueError, match="Linear: 16 bytes, and its fields take 32"):
        atb.read(atb.Linear, given)


def test_tensors_in_a_private_format_are_for_kernels_that_ask_for_them() -> None:
    memory = torch.arange(2 * 16 * 16, dtype=torch.float16)
    size, stored = (ctypes.c_int64 * 2)(10, 20), (ctypes.c_int64 * 4)(2, 1, 16, 16)
    strides = (ctypes.c_int64 * 2)(20, 1)
    two, four = ctypes.c_uint64(2), ctypes.c_uint64(4)
    tensor = made("aclCreateTensor", size, two, 1, strides, 0, 29, stored, four, ctypes.c_void_p(memory.data_ptr()))
    with pytest.raises(NotImplementedError, match="a tensor in storage format 29"):
        marshal.arguments("T", [tensor], [])
    (read,) = marshal.arguments("T", [tensor], [], formats=True)
    assert read.private and read.size == [10, 20] and torch.equal(read.memory.flatten(), memory)


def test_specifications_are_checked_when_they_are_registered() -> None:
    with pytest.raises(ValueError, match="unknown letters"):
        marshal.kernel("aclnnNothing", "TX")
    with pytest.raises(ValueError, match="has two handlers"):
        marshal.kernel("aclnnAdd", "TTST")
    with pytest.raises(ValueError, match="or too long"):
        marshal.kernel("aclnnNothing", "D" * 9)


def test_a_specification_that_does_not_fit_the_call_is_refused_at_the_call() -> None:
    spec = marshal.registered()["aclnnSinh"]
    library().ascend_sim_register(b"aclnnSinh", b"TIT")
    try:
        with pytest.raises(RuntimeError, match='aclnnSinh is specified as "TIT" and called with "TT"'):
            torch.sinh(torch.ones(2, device="npu"))
    finally:
        library().ascend_sim_register(b"aclnnSinh", spec.encode())
    assert torch.equal(torch.sinh(torch.ones(2, device="npu")).cpu(), torch.sinh(torch.ones(2)))


def test_a_kernel_fails_on_demand() -> None:
    x = torch.ones(4, device="npu")
    runtime.fail_next("aclnnMuls", 507035, after=1)
    _ = x * 2
    with pytest.raises(RuntimeError, match="507035"):
        _ = x * 2
    assert torch.equal((x * 2).cpu(), torch.full((4,), 2.0))
    runtime.fail_next("aclrtMemcpy", 507899)
    assert runtime.forget_failures() == 1
