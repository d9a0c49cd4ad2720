"""Whether a capture failed at a read by the host, which no graph can hold: told from the error, whatever the device."""

from __future__ import annotations

import dis
import linecache
import os
import re

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_REFUSED = re.compile(r"\bcaptur(?:e|ing)\b")
"""A word by which runtimes refuse calls while they capture; in names of their functions it is part of a longer word."""
_READS = re.compile(r"\.(?:item|tolist|cpu|numpy|nonzero)\([^()]*\)$|^(?:bool|int|float)\(")
_CONDITIONS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
"""Instructions that ask an object for its truth, by the start of their names."""


def is_host_read(error: BaseException) -> bool:
    """Tell whether an error arose where the host asked a tensor for its values: a call, or a condition on it.

    True also where a runtime says itself that it refuses a call while capturing. Of several errors the first counts:
    a capture that is ended after an error fails once more, with a text of its own.
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
    # From Python 3.13 on, a comparison that is a condition asks for the truth of what it gives, in one instruction.
    asks = at.opname.startswith(_CONDITIONS) or at.argrepr.startswith("bool(")
    return asks or bool(_READS.search(call.strip()))
