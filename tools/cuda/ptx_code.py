"""PTX read into instructions, and what each of them does to global memory.

Reads what Triton's compiler writes: one entry, no functions called but those that it has drawn in. Of inline assembly
with several instructions in braces each is one here, too. The opcodes are those of NVIDIA's PTX ISA, chapter 9.7.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

_COMMENT = re.compile(r"//.*|/\*.*?\*/")
_LOCATION = re.compile(r"\s*\.loc\s[^/]*(?://\s*([^\s@]+))?")
_LABEL = re.compile(r"\s*([$%\w]+)\s*:(?!:)")
_BRACES = re.compile(r"[\s{}]*")
_INSTRUCTION = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z]\w*(?:\.[\w:]+)*)\s*(.*)", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+([^,]*?)([\w$]+)\s*(\[\d+\])?\s*(?:,|$)")

WAIT, FETCH, READ, STORE, START, BRANCH, RETURN, CALL, STOP, OTHER = (
    *("wait", "fetch", "read", "store", "start", "branch", "return", "call", "stop", "other"),
)
"""What an instruction does. Of global memory: FETCH brings it into the L2 cache, where nobody sees it, READ and STORE
are for all to see. START lets the next kernel start. STOP ends the whole kernel with an error."""

_KINDS = {"bra": BRANCH, "brx": BRANCH, "ret": RETURN, "exit": RETURN, "call": CALL, "trap": STOP}
_WRITERS = {"st", "red", "atom", "multimem", "sust", "sured", "discard", "tensormap"}
_READERS = {"ld", "ldu", "tex", "tld4", "suld", "prefetch", "prefetchu"}
_PRIVATE = {"param", "const", "local"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction."""

    #: register that decides whether it runs, "" where it always does
    guard: str
    #: as `ld.global.b32`
    opcode: str
    #: the operands, as they stand there
    operands: tuple[str, ...]
    #: file and line of the kernel's source, or ""
    source: str = ""

    @property
    def kind(self) -> str:
        """What it does, one of the kinds above."""
        return _kind(self.opcode)

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        place = f" ({self.source})" if self.source else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip() + place


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the entry."""

    name: str
    #: whether it may be an address in global memory, or is the descriptor of a tensor
    is_address: bool


@dataclass(frozen=True, slots=True)
class Code:
    """An entry: its parameters in order, its instructions, and before which of them each label stands."""

    name: str
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


@functools.cache
def _kind(opcode: str) -> str:
    root, *rest = opcode.split(".")
    spaces = [part.partition(":")[0] for part in rest]
    if root == "griddepcontrol":
        return WAIT if "wait" in rest else START
    if opcode.startswith(("cp.async", "cp.reduce.async")):
        return _copy(spaces)
    if root in _KINDS:
        return _KINDS[root]
    if "tensormap" in rest or "shared" in spaces or _PRIVATE.intersection(spaces):
        return OTHER  # no memory, or what no other kernel sees
    if root == "prefetch" and any(part.startswith("L2") for part in rest):
        return FETCH
    return STORE if root in _WRITERS else READ if root in _READERS else OTHER


def _copy(spaces: list[str]) -> str:
    """Return what an asynchronous copy does: of its spaces the first is that of the destination, if there is one."""
    if "prefetch" in spaces:
        return FETCH
    named = [space for space in spaces if space in ("global", "shared")]
    if not named:
        return OTHER  # commits or waits for copies
    return STORE if named[0] == "global" else READ if "global" in named else OTHER


def split_operands(text: str) -> tuple[str, ...]:
    """Return operands, which commas separate outside brackets and braces."""
    found, depth, begin = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and depth == 0:
            found.append(text[begin:place].strip())
            begin = place + 1
    found.append(text[begin:].strip())
    return tuple(each for each in found if each)


def read_ptx(text: str) -> Code:
    """Return the entry of a module."""
    # Comments of parameters have been seen to hold nothing that matters; those of .loc name the source.
    entry = _ENTRY.search("\n".join(_COMMENT.sub("", line) for line in text.split("\n")))
    if entry is None:
        raise ValueError("the PTX has no entry")
    declared = _PARAMETER.findall(entry[2].replace("\n", " "))
    marked = any(".ptr" in kind for kind, _, _ in declared)  # else each of 64 bits may be one
    parameters = tuple(
        Parameter(name=name, is_address=bool(array) or (".ptr" if marked else "64") in kind)
        for kind, name, array in declared
    )
    begin = text.index("{", re.search(rf"\.entry\s+{re.escape(entry[1])}\b", text).start())  # type: ignore[union-attr]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    pending, source = "", ""
    for line in text[begin:].split("\n"):
        location = _LOCATION.match(line)
        if location is not None:
            source = location[1] or ""
            continue
        pending += _COMMENT.sub("", line) + "\n"
        pending = _take(pending, source, instructions, labels)
        if pending.strip().startswith((".section", ".func", ".entry", ".visible")):
            break  # of debuggers, or the next function
    return Code(entry[1], parameters, tuple(instructions), labels)


def _take(pending: str, source: str, instructions: list[Instruction], labels: dict[str, int]) -> str:
    """Take whole statements from the beginning of a text; return the rest."""
    while True:
        pending = pending[_BRACES.match(pending).end() :]  # type: ignore[union-attr]
        label = _LABEL.match(pending)
        if label is not None:
            labels[label[1]] = len(instructions)
            pending = pending[label.end() :]
            continue
        statement, end, rest = pending.partition(";")
        if not end:
            return pending
        pending = rest
        found = _INSTRUCTION.match(statement.strip())
        if found is not None:  # no directive
            instructions.append(Instruction(found[2] or "", found[3], split_operands(found[4]), source))
