"""Recognises, from the error, a capture that failed because the host read a tensor, which no graph can hold."""

from __future__ import annotations

import dis
import linecache
import os
import re

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_REFUSED = re.compile(r"\bcaptur(?:e|ing)\b")
"""A word in the errors by which runtimes refuse calls during a capture; in their functions' names it is part of a
longer word."""
_READS = re.compile(r"\.(?:item|tolist|cpu|numpy|nonzero)\([^()]*\)$|^(?:bool|int|float)\(")
_CONDITIONS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
"""Instructions that ask an object for its truth, by the start of their names."""


def is_host_read(error: BaseException) -> bool:
    """Tell whether an error arose where the host reads a tensor's values: in a call, or in a condition on it.

    Also True if a runtime itself says that it refuses a call while capturing. Of chained errors the first counts:
    ending a capture after an error raises another error.
    """
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    if _REFUSED.search(str(error)):
        return True
    last, trace = None, error.__traceback__
    while trace is not None:
        last = trace if not trace.tb_frame.f_code.co_filename.startswith(_TORCH) else last
        trace = trace.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    at = next((each for each in dis.get_instructions(code) if each.offset == last.tb_lasti), None)
    if at is None or at.positions is None:
        return False
    line, place = linecache.getline(code.co_filename, last.tb_lineno), at.positions
    within = place.lineno == place.end_lineno
    call = line.encode()[place.col_offset : place.end_col_offset].decode(errors="replace") if within else line
    # From Python 3.13 on, one instruction both compares and takes the truth value of the result.
    asks = at.opname.startswith(_CONDITIONS) or at.argrepr.startswith("bool(")
    return asks or bool(_READS.search(call.strip()))
