"""The site of the documentation: its navigation, links that leave docs/, the picture, and what its reference names."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

import core
from documentation import site_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = re.findall(r"^ +- .*: ([\w/.-]+\.md)", CONFIG[: CONFIG.index("not_in_nav")], re.M)
EXCLUDED = {"performance/notes.md"}


def unknown_folders(picture: str, root: Path) -> list[str]:
    """Return the paths that a picture writes in a fixed-width font and that are not in the repository."""
    named = re.findall(r'font-family="monospace"[^>]*>([^<]+)<', picture)
    assert named
    return [path for path in named if not (root / path).exists()]


def test_each_page_has_one_place_in_the_navigation() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - EXCLUDED
    assert sorted(NAVIGATION) == sorted(pages | set(site_pages.ROOT_PAGES.values()))


def test_the_folders_of_the_picture_exist() -> None:
    picture = (DOCS / "way.svg").read_text(encoding="utf-8")
    assert unknown_folders(picture, ROOT) == []
    assert unknown_folders(picture.replace("core/engine/http", "core/engine/web"), ROOT) == ["core/engine/web"]


@pytest.mark.parametrize(
    ("uri", "link", "wanted"),
    [
        ("index.md", "[a](docs/passes.md#how-to-look)", "[a](passes.md#how-to-look)"),
        ("index.md", "[a](examples/acme_device)", "a"),
        ("index.md", "[a](core/hookspecs.py)", "[a](source/core/hookspecs.py.md)"),
        ("tutorials/pass.md", "[a](../../CONTRIBUTING.md#tests)", "[a](../contributing.md#tests)"),
        ("tutorials/pass.md", "[a](bisect.md)", "[a](bisect.md)"),
        ("limits.md", "[a](../README.md)", "[a](index.md)"),
        (
            "limits.md",
            "[a](#b) ![c](way.svg) [d](https://pytorch.org)",
            "[a](#b) ![c](way.svg) [d](https://pytorch.org)",
        ),
    ],
)
def test_links_lead_to_pages_of_the_site(uri: str, link: str, wanted: str) -> None:
    assert site_pages.LINK.sub(lambda found: site_pages.rewritten(ROOT, uri, found), link) == wanted


def test_a_link_to_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = site_pages.LINK.search("[a](../core/gone.py)")
    assert found is not None
    with caplog.at_level(logging.WARNING):
        assert site_pages.rewritten(ROOT, "limits.md", found) == found[0]
    assert caplog.messages == ["limits.md links to ../core/gone.py, and there is no core/gone.py"]


def test_the_source_of_a_linked_file_is_a_page() -> None:
    page = site_pages.source_page(ROOT, "core/_version.py")
    assert page.startswith("# core/_version.py\n\n````python\n")
    assert "__version__" in page


def test_the_reference_names_what_is_public() -> None:
    named = re.findall(r"^::: core\.(\w+)$", (DOCS / "reference/core.md").read_text(encoding="utf-8"), re.M)
    assert sorted(named) == sorted(set(core.__all__) - {"__version__"})


def test_the_contract_names_what_hooks_take_and_return() -> None:
    hooks = (ROOT / "core/hookspecs.py").read_text(encoding="utf-8")
    types = set(re.findall(r"-> (?:Sequence\[)?(\w+)", hooks)) | {"OpenContext", "DeviceContext"}
    reference = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    missing = [name for name in sorted(types) if not re.search(rf"^::: \S+\.{name}$", reference, re.M)]
    assert missing == ["GraphBackendFactory"]  # a function that returns a GraphBackend, which is there


def test_the_readme_dates_the_proof_of_each_device_as_its_report_does() -> None:
    (row,) = re.findall(r"^\| level of 3, and when \|(.*)\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    for cell in row.split(" | "):
        found = re.search(r"(\d), (\d{4}-\d\d-\d\d).*docs/(conformance/\w+)\.md", cell)
        assert found is not None, cell
        report = json.loads((DOCS / f"{found[3]}.json").read_text(encoding="utf-8"))
        assert (str(report["level"]), report["started"][:10]) == (found[1], found[2]), cell
