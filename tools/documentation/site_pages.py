"""Hooks of mkdocs: pages from outside of docs/, and links that leave docs/.

README.md is the first page of the site. A link to a file of the repository that is no page shows the file's source on a
page of its own; a link to a folder becomes plain text. A link to what does not exist is a warning, and `mkdocs build
--strict` then fails.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site by the file at the top of the repository that holds them."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".json": "json"}

logger = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and a page for the source of each file that a page links to."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(root / name).read_text(encoding="utf-8")))
    sources = {
        target
        for file in files.documentation_pages()
        for target in (repository_path(file.src_uri, link[1]) for link in LINK.findall(file.content_string))
        if target is not None and is_source(root, target)
    }
    for source in sorted(sources):
        files.append(File.generated(config, f"source/{source}.md", content=source_page(root, source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to pages of the site."""
    root = Path(config.config_file_path).parent
    return LINK.sub(lambda link: rewritten(root, page.file.src_uri, link), markdown)


def rewritten(root: Path, uri: str, link: re.Match[str]) -> str:
    """Return a link of the page `uri` as the site needs it."""
    text, target = link.groups()
    path = repository_path(uri, target)
    if path is None:
        return link[0]
    _, mark, anchor = target.partition("#")
    if (root / path).is_dir():
        return str(text)
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
    elif path in ROOT_PAGES:
        page = ROOT_PAGES[path]
    elif is_source(root, path):
        page = f"source/{path}.md"
    else:
        logger.warning(f"{uri} links to {target}, and there is no {path}")
        return link[0]
    return f"[{text}]({os.path.relpath(page, PurePosixPath(uri).parent)}{mark}{anchor})"


def repository_path(uri: str, target: str) -> str | None:
    """Return the path in the repository that a link of the page `uri` leads to; None for any other link."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:|/", path):
        return None
    names = {page: name for name, page in ROOT_PAGES.items()}
    here = PurePosixPath(names.get(uri, f"docs/{uri}"))
    return os.path.normpath(here.parent / path)


def is_source(root: Path, path: str) -> bool:
    """Tell whether a path of the repository is a file that no page of the site holds."""
    return not path.startswith(("docs/", "..")) and path not in ROOT_PAGES and (root / path).is_file()


def source_page(root: Path, path: str) -> str:
    """Return a page that shows a file of the repository."""
    text = (root / path).read_text(encoding="utf-8")
    return f"# {path}\n\n````{LANGUAGES.get(PurePosixPath(path).suffix, 'text')}\n{text.rstrip()}\n````\n"
