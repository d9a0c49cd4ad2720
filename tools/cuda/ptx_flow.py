"""Where the values in registers come from, along every way through a kernel.

Each register has a set of origins, the union over all ways that lead to an instruction; shared and local memory are
followed as if they were one register each. Which way a branch takes is not an origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ptx_code import BRANCH, OTHER, READ, RETURN, STOP, WAIT, Code, Instruction

_WORD = re.compile(r"%?[A-Za-z_$][\w$.]*")
_SHARED, _LOCAL = "*shared", "*local"
_NO_RESULT = {"st", "red", "bar", "barrier", "bra", "cp", "prefetch", "mbarrier", "fence", "membar", "stmatrix"}

ADDRESS, VALUE, AGAIN = "address", "value", "again"
Origin = tuple[str, int]
"""ADDRESS: the parameter of this number itself. VALUE: what was loaded before the wait from memory to which it points.
AGAIN: what was loaded from there after it."""
State = dict[str, frozenset[Origin]]
"""Origins by register."""
UNKNOWN = -1
"""Stands for the parameter of an address that does not come from one."""
_NONE: frozenset[Origin] = frozenset()


def words_of(operand: str) -> tuple[str, ...]:
    """Return the registers and parameters that an operand names."""
    return tuple(_WORD.findall(operand))


def waits(instruction: Instruction) -> bool:
    """Return whether it is a wait that no condition can skip."""
    return instruction.kind == WAIT and not instruction.guard


def left_by_wait(state: State) -> State:
    """Return the registers that have origins, if some were loaded, else none; of shared memory nothing is known."""
    kept = {name: origins for name, origins in state.items() if name != _SHARED}
    return kept if any(kind == VALUE for origins in kept.values() for kind, _ in origins) else {}


class Names:
    """What the instructions of a kernel take and give, by place; read once."""

    def __init__(self, code: Code) -> None:
        self.numbers = {p.name: frozenset({(ADDRESS, n)}) for n, p in enumerate(code.parameters)}
        self.taken = tuple(tuple(_taken(each)) for each in code.instructions)
        self.given = tuple(tuple(_given(each)) for each in code.instructions)

    def origins(self, words: tuple[str, ...], state: State) -> frozenset[Origin]:
        """Return where the values of registers and parameters come from."""
        found = [origins for word in words if (origins := state.get(word) or self.numbers.get(word))]
        return _NONE.union(*found) if found else _NONE

    def parameters(self, code: Code, instruction: Instruction, state: State) -> set[int]:
        """Return the numbers of the parameters from which a load's address comes."""
        place = 0 if instruction.opcode.startswith("prefetch") else 1
        words = words_of(instruction.operands[place]) if len(instruction.operands) > place else ()
        found = {n for kind, n in self.origins(words, state) if kind == ADDRESS and code.parameters[n].is_address}
        return found or {UNKNOWN}


class Flow:
    """The origins before each instruction that is reached, up to a wait or, `past_wait`, to the kernel's end."""

    def __init__(self, code: Code, names: Names, begin: dict[int, State], *, past_wait: bool = False) -> None:
        """Follow all ways from these places on; past_wait: they begin behind the wait."""
        self.code, self.names, self.past_wait = code, names, past_wait
        #: whether a way leads past the last instruction
        self.falls_off = False
        self._before: dict[int, State] = {}
        self._blocks = {0, *code.labels.values(), *begin}
        for place, instruction in enumerate(code.instructions):
            if instruction.kind in (BRANCH, RETURN, STOP) or waits(instruction):
                self._blocks.add(place + 1)
        due = [place for place, state in begin.items() if self._join(place, state)]
        while due:
            place, state = self._through(due.pop())
            due += [after for after in self._after(place) if self._join(after, state)]

    def steps(self) -> Iterator[tuple[int, State]]:
        """Yield each instruction that is reached, with the origins before it."""
        for begin, before in sorted(self._before.items()):
            state = dict(before)
            for place in self._places(begin):
                yield place, state
                self._apply(place, state)

    def _places(self, begin: int) -> Iterator[int]:
        for place in range(begin, len(self.code.instructions)):
            yield place
            if place + 1 in self._blocks:
                return

    def _through(self, begin: int) -> tuple[int, State]:
        """Return the last place of a block, with the origins after it."""
        state, last = dict(self._before[begin]), begin
        for last in self._places(begin):
            self._apply(last, state)
        return last, state

    def _after(self, place: int) -> list[int]:
        """Return where a way goes on."""
        instruction = self.code.instructions[place]
        found = []
        if instruction.kind == BRANCH:
            named = [self.code.labels[name] for name in instruction.operands if name in self.code.labels]
            found = named or list(self.code.labels.values())  # a table of targets: any
        ends = instruction.kind in (BRANCH, RETURN, STOP) and not instruction.guard
        if not ends and not (waits(instruction) and not self.past_wait):
            found.append(place + 1)
        self.falls_off |= len(self.code.instructions) in found
        return [place for place in found if place < len(self.code.instructions)]

    def _join(self, place: int, state: State) -> bool:
        """Add origins to those before a place; return whether the place is new or has more of them."""
        known = self._before.get(place)
        if known is None:
            self._before[place] = dict(state)
            return True
        more = {name: origins for name, origins in state.items() if not origins <= known.get(name, _NONE)}
        for name, origins in more.items():
            known[name] = known.get(name, _NONE) | origins
        return bool(more)

    def _apply(self, place: int, state: State) -> None:
        """Let an instruction change the origins."""
        instruction = self.code.instructions[place]
        origins = self.names.origins(self.names.taken[place], state)
        if instruction.kind == READ:
            kind = AGAIN if self.past_wait else VALUE
            read = ((kind, number) for number in self.names.parameters(self.code, instruction, state))
            origins = frozenset(o for o in origins if o[0] != ADDRESS).union(read)
        for name in self.names.given[place]:
            if instruction.guard or name in (_SHARED, _LOCAL):
                origins = origins | state.get(name, _NONE)  # what was there may stay
            if origins:
                state[name] = origins
            else:
                state.pop(name, None)


def _has_result(instruction: Instruction) -> bool:
    return instruction.opcode.partition(".")[0] not in _NO_RESULT


def _memory(instruction: Instruction) -> list[str]:
    """Return the memory, other than global, that an instruction reads or writes."""
    spaces = [part.partition(":")[0] for part in instruction.opcode.split(".")]
    return [_SHARED] if "shared" in spaces else [_LOCAL] if "local" in spaces else []


def _given(instruction: Instruction) -> list[str]:
    """Return the registers, or the memory, that an instruction writes."""
    if _has_result(instruction):
        return _WORD.findall(instruction.operands[0]) if instruction.operands else []
    return _memory(instruction)


def _taken(instruction: Instruction) -> list[str]:
    """Return the registers, parameters and memory that an instruction reads."""
    operands = instruction.operands[1:] if _has_result(instruction) else instruction.operands
    words = [word for operand in operands for word in _WORD.findall(operand)]
    words += [instruction.guard] if instruction.guard else []
    return words + (_memory(instruction) if _has_result(instruction) and instruction.kind == OTHER else [])
