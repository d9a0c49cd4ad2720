"""The documentation says nothing that does not run: code and tables of its pages, commands and what they print."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from core.cli import COMMANDS, _app, main
from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.order import order
from core.engine.models.assets import embedded_model
from tests.dynamo_backend import with_backend

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/passes.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
TUTORIALS = [path.relative_to(ROOT / "docs").as_posix()[:-3] for path in sorted(ROOT.glob("docs/tutorials/*.md"))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of a page. slow: whether the line before it is `<!-- slow -->`."""

    kind: str
    text: str
    line: int
    slow: bool


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    lines, start = text.splitlines(), None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        slow = start > 0 and lines[start - 1] == "<!-- slow -->"
        body = "\n".join(lines[start + 1 : number])
        yield Block(kind=lines[start][3:], text=body, line=start + 2, slow=slow)
        start = None


SHOWING = [PAGE, README, *((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in TUTORIALS)]
COMMANDS_SHOWN = [block for text in SHOWING for block in blocks(text) if block.kind == "console"]


def matches(shown: str, printed: str) -> bool:
    """Tell whether a text is what a page shows of it: `…` stands for anything, a line of it alone for any lines."""
    pattern = ""
    for line in shown.strip().splitlines():
        parts = [r"\s+".join(map(re.escape, part.split())) for part in line.split("…")]
        pattern += r"(?:.*\n)*?" if line.strip() == "…" else r"[^\n]*".join(parts) + r"\s*?\n"
    lines = (" ".join(line.split()) for line in printed.strip().splitlines())
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def run(block: Block, names: dict[str, Any], page: str = "docs/passes.md") -> str:
    """Run a block of Python with the names of those before it, and return what it prints."""
    printed = io.StringIO()
    # Lines are counted as in the page, for tracebacks.
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def run_all(chosen: list[Block], names: dict[str, Any], page: str = "docs/passes.md") -> None:
    """Run the Python among the blocks and compare what each prints with the text that is shown after it."""
    for block, after in zip(chosen, [*chosen[1:], None], strict=True):
        if block.kind == "python":
            printed = run(block, names, page)
            shown = after.text if after is not None and after.kind == "text" else ""
            if not matches(shown, printed):
                pytest.fail(f"{page}, line {block.line}, prints:\n{printed}")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Run the code of the page that is not slow, and return what it defines."""
    module = types.ModuleType("docs_passes")
    sys.modules[module.__name__] = module  # Dynamo imports the module that a traced function is from
    run_all([block for block in with_output(PAGE) if not block.slow], vars(module))
    return vars(module)


def with_output(text: str) -> list[Block]:
    """Return the blocks of a page; what a slow block prints is slow as well."""
    found: list[Block] = []
    for block in blocks(text):
        slow = block.slow or (block.kind == "text" and bool(found) and found[-1].slow)
        found.append(replace(block, slow=slow))
    return found


@pytest.mark.slow
def test_the_code_of_the_page_runs_and_prints_what_is_shown(names: dict[str, Any]) -> None:
    assert len([block for block in blocks(PAGE) if block.kind == "python"]) >= 10
    assert names["FUSE_SOFTCAP"].name == "acme_softcap"


def programs(page: str) -> Iterator[tuple[Block, str | None]]:
    """Yield the Python of a page, each block a program of its own, with what it prints where that is shown under it."""
    found = list(blocks((ROOT / f"docs/{page}.md").read_text(encoding="utf-8")))
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.kind == "python":
            under = block.line + len(block.text.splitlines()) + 3  # its own fence, an empty line, the other's
            is_shown = after is not None and (after.kind, after.line) == ("text", under)
            yield block, after.text if after is not None and is_shown else None


PROGRAMS = [
    pytest.param(page, block, shown, id=f"{page} line {block.line}", marks=pytest.mark.slow if block.slow else ())
    for page in ("capture", "attention", "quantization", "fakes", "serving", "torch-compile")
    for block, shown in programs(page)
]


@pytest.mark.parametrize(("page", "block", "shown"), PROGRAMS)
def test_each_program_of_a_page_runs(
    page: str, block: Block, shown: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    with_backend()
    torch._dynamo.reset()
    module = types.ModuleType(f"docs_{page}_{block.line}")
    sys.modules[module.__name__] = module
    printed = run(block, vars(module), f"docs/{page}.md")
    if shown is not None and not matches(shown, printed):
        pytest.fail(f"docs/{page}.md, line {block.line}, prints:\n{printed}")


def _names_of_fragments() -> dict[str, Any]:
    """What code that shows a part of a plugin takes from the rest of it."""
    from core.common.conformance import ConformanceProfile
    from core.common.fakes import FakeOp
    from core.common.fakes.rules import half_last
    from core.common.ops.declaration import Sample
    from core.common.ops.implementation import OpCall, OpImplementation
    from core.hookspecs import hookimpl

    kinds = (ConformanceProfile, FakeOp, OpCall, OpImplementation, Sample, half_last, torch, Iterator)
    own = {"fastlib_linear": torch.nn.functional.linear, "why_not": lambda call: None, "lacking": None}
    return {kind.__name__: kind for kind in kinds} | own | {"hookimpl": hookimpl}


FRAGMENTS = [
    pytest.param(page, block, id=f"{page} line {block.line}")
    for page in ("conformance", "providers", "writing-a-plugin")
    for block, _ in programs(page)
    if "…" not in block.text  # what leaves something out is no program
]


@pytest.mark.parametrize(("page", "block"), FRAGMENTS)
def test_each_fragment_of_a_plugin_runs_and_its_functions_return(page: str, block: Block) -> None:
    names = _names_of_fragments()
    given = names.keys() | {"__builtins__"}
    run(block, names, f"docs/{page}.md")
    for name in names.keys() - given:
        if name.startswith("core_"):
            names[name]()
        elif name == "rows":
            assert list(names[name](torch.device("cpu")))


@pytest.mark.slow
def test_the_program_of_a_job_runs_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    ((block, _),) = programs("distributed")
    text = block.text.replace('"path/to/llama"', "embedded_model()").replace('lowering="inline"', 'mode="off"')
    assert text.count("embedded_model()") == 1 and 'mode="off"' in text
    try:
        assert run(replace(block, text=text), {"embedded_model": embedded_model}, "docs/distributed.md").strip()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def code(page: str) -> list[Block]:
    """Return the Python of a page and what is shown of its output."""
    found = with_output((ROOT / f"docs/{page}.md").read_text(encoding="utf-8"))
    return [block for block in found if block.kind in ("python", "text")]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if any(block.slow for block in code(page)) else ())
        for page in TUTORIALS
        if code(page)
    ],
)
def test_each_tutorial_runs_from_start_to_end(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"docs_{page.replace('/', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run_all(code(page), vars(module), f"docs/{page}.md")


STANDING_IN = {'"path/to/llama", "auto"': 'embedded_model(), "cpu", small'}
"""What the README's code leaves to its reader, and what stands there in the test."""


@pytest.mark.slow
def test_the_code_of_the_readme_runs() -> None:
    import core

    small = core.EngineConfig(max_num_seqs=2, max_model_len=64, options=core.CompileOptions(mode="off"))
    names = {"embedded_model": embedded_model, "small": small}
    printed = []
    for block in blocks(README):
        if block.kind == "python":
            for asked, given in STANDING_IN.items():
                block = replace(block, text=block.text.replace(asked, given))
            printed.append(run(block, names, "README.md"))
    assert len(printed) == 2
    assert "cpu" in printed[0] and "paged" in printed[1]


@pytest.mark.slow
def test_the_slow_code_of_the_page_does_so_too(names: dict[str, Any]) -> None:
    chosen = [block for block in with_output(PAGE) if block.slow]
    assert any(block.kind == "python" for block in chosen)
    run_all(chosen, names)


@pytest.mark.slow
@pytest.mark.skipif(
    (version("torch")[:4], version("transformers")[:4]) != ("2.13", "5.23"),
    reason="counts of nodes are those of torch 2.13 and transformers 5.23",
)
@pytest.mark.parametrize("block", COMMANDS_SHOWN, ids=lambda block: block.text.split("\n")[0])
def test_commands_print_what_is_shown(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, shown = block.text.partition("\n")
    main(shlex.split(command)[2:])
    printed = capsys.readouterr().out
    if not matches(shown, printed):
        pytest.fail(f"{command} prints:\n{printed}")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_exists(page: str) -> None:
    """Parse what stands after a prompt, and each `core …` in running text that names options."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"^(?:\$ |    )(core .+)$", text, re.MULTILINE)
    commands += re.findall(r"`(core [a-z]+ --[^`…|\[]+)`", text)
    for command in commands:
        _, name, *arguments = shlex.split(command, comments=True)
        assert name in COMMANDS, f"{page}: {command}"
        found: Any = typer.main.get_command(_app(name))
        found.commands[name].make_context(name, arguments)


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the page's table under that heading row."""
    lines = PAGE[PAGE.index(heading) :].splitlines()[2:]
    table = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_every_common_pass_is_described_in_the_order_of_execution() -> None:
    described = [row[0].strip("`") for row in rows("| pass | does |")]
    assert described == [declared.name for declared in order(COMMON_PASSES)]


def arguments(op: CanonicalOp) -> str:
    """Return the arguments of an op as the table of ops writes them."""
    written, starred = [], False
    for argument in op.overload._schema.arguments:
        if argument.kwarg_only and not starred:
            starred = True
            written.append("*")
        text = argument.name + "!" * (argument.name in op.mutates) + "?" * (str(argument.type).startswith("Optional"))
        default = argument.default_value if argument.has_default_value() else None
        written.append(text if default is None else f"{text}={str(default).lower()}")
    return ", ".join(written)


def test_every_canonical_op_is_described_by_its_declaration() -> None:
    described = {row[0]: (row[1], row[3]) for row in rows("| op | arguments |")}
    declared = {
        f"`{op.qualified_name}`" + " (costly)" * op.costly: (f"`{arguments(op)}`", "yes" * op.break_point) for op in OPS
    }
    assert described == declared
    assert all(row[2] for row in rows("| op | arguments |"))


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        ("a … c", "a b c", True),
        ("a   b", "a b", True),
        ("a b", "a c", False),
        ("", "a", False),
        ("a\n…\nd", "a\nb\nc\nd\n", True),
        ("a\n…\nd", "a\nb\nc\n", False),
        ("took … ms", "took 3\nms", False),
    ],
)
def test_what_is_left_out_matches_and_nothing_else_does(shown: str, printed: str, fits: bool) -> None:
    assert matches(shown, printed) is fits


def test_a_page_that_prints_something_else_fails() -> None:
    wrong = list(blocks("```python\nprint(1)\n```\n```text\n2\n```\n"))
    assert [block.kind for block in wrong] == ["python", "text"]
    with pytest.raises(pytest.fail.Exception, match="line 2, prints:\n1"):
        run_all(wrong, {})
