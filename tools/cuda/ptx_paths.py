"""What a kernel does before `griddepcontrol.wait`, and whether all ways through it get there.

A thread's way is followed from the entry, along both sides of each branch with a predicate, to the first wait that has
none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptx_code import CALL, READ, RETURN, START, STORE, WAIT, Code, Instruction, read_ptx
from ptx_flow import AGAIN, UNKNOWN, VALUE, Flow, Names, State, left_by_wait, waits, words_of

__all__ = ["UNKNOWN", "EarlyRead", "Findings", "analyse"]

_PAST_L1 = {"cg", "cv", "volatile", "relaxed", "acquire"}
_COMPARES = {"setp", "set"}
_EQUAL = {"eq", "ne", "equ", "neu"}
_FAULTS = {
    STORE: "stores",
    RETURN: "ends",
    CALL: "calls a function, which is not followed,",
    START: "lets the next kernel start",
}
"""What no kernel that overlaps may do before it has waited."""


@dataclass(slots=True)
class EarlyRead:
    """What is read before the wait through one parameter."""

    #: one of the loads
    example: str
    #: whether all of its loads go past the L1 cache
    past_l1: bool = True
    #: an instruction after the wait that takes what was loaded or what was computed from it, or ""
    used: str = ""
    #: whether an instruction asks whether it is what is loaded there again after the wait
    compared: bool = False


@dataclass(slots=True)
class Findings:
    """What a kernel does before its wait."""

    faults: list[str] = field(default_factory=list)
    #: by the number of a parameter, or `UNKNOWN`
    reads: dict[int, EarlyRead] = field(default_factory=dict)


def analyse(text: str) -> tuple[Code, Findings]:
    """Return a kernel's code, and what it does before its wait."""
    code = read_ptx(text)
    names = Names(code)
    flow = Flow(code, names, {0: {}})
    found = Findings()
    behind: dict[int, State] = {}  # what registers hold after each wait, where some of it was loaded
    for place, state in flow.steps():
        instruction = code.instructions[place]
        if waits(instruction):
            behind |= {place + 1: left} if (left := left_by_wait(state)) else {}
        elif instruction.kind == WAIT:
            found.faults.append(f"waits on a condition only: {instruction}")
        elif instruction.kind in _FAULTS:
            found.faults.append(f"{_FAULTS[instruction.kind]} before the wait on some way through it: {instruction}")
        elif instruction.kind == READ:
            for number in names.parameters(code, instruction, state):
                read = found.reads.setdefault(number, EarlyRead(str(instruction)))
                read.past_l1 = read.past_l1 and bool(_PAST_L1.intersection(instruction.opcode.split(".")))
    if flow.falls_off:
        found.faults.append("ends before the wait on some way through it: no instruction follows")
    for place, state in Flow(code, names, behind, past_wait=True).steps():
        instruction, origins = code.instructions[place], names.origins(names.taken[place], state)
        for number in {number for kind, number in origins if kind == VALUE}.intersection(found.reads):
            read = found.reads[number]
            read.used = read.used or str(instruction)
            read.compared = read.compared or _compares(names, instruction, state, number)
    return code, found


def _compares(names: Names, instruction: Instruction, state: State, number: int) -> bool:
    """Tell whether this asks if what was loaded by a parameter before the wait is what was loaded after it.

    Each side must come from one of the two alone: a value made of both says nothing of either.
    """
    words = instruction.opcode.split(".")
    if words[0] not in _COMPARES or not _EQUAL.intersection(words):
        return False
    first, second = (VALUE, number), (AGAIN, number)
    sides = [names.origins(words_of(operand), state) for operand in instruction.operands[1:3]]
    told = [(first in side, second in side) for side in sides]
    return sorted(told) == [(False, True), (True, False)]
