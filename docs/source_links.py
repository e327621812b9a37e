"""Hook of the documentation site: put files of the repository that pages link to into the site.

Pages link to tests, examples and sources by paths that leave `docs/`, such as `../tests/test_layout.py`, so that the links work
in a checkout. The site can't follow such a path. The hook therefore publishes a copy of each linked file as plain text below
`repository/`, and points the link there. A link to a file that does not exist is a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

logger = logging.getLogger("mkdocs.hooks.source_links")

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
"""Folder of the site that holds the copies."""

_LINK = re.compile(r"(?<=\]\()(?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a copy of each file outside `docs/` that a page links to."""
    linked: set[str] = set()
    for page in files.documentation_pages():
        text = Path(page.abs_src_path or "").read_text("utf-8")
        linked.update(path for path, _ in _outside(page.src_uri, text))
    for path in sorted(linked):
        if not (ROOT / path).is_file():
            logger.warning("a page links to %s, which is not a file of the repository", path)
            continue
        content = (ROOT / path).read_text("utf-8")
        files.append(File.generated(config, _copy_of(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside `docs/` at their copies."""
    here = dirname(page.file.src_uri)
    for path, found in _outside(page.file.src_uri, markdown):
        markdown = markdown.replace(f"]({found})", f"]({relpath(_copy_of(path), here or os.curdir)})")
    return markdown


def _outside(page: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield path from the root, and target as written, of each link that leaves `docs/`. `page` is relative to `docs/`."""
    for match in _LINK.finditer(text):
        path = normpath(f"docs/{dirname(page)}/{match['path']}")
        if not path.startswith("docs/"):
            yield path, match[0]


def _copy_of(path: str) -> str:
    return f"{FOLDER}/{path}.txt"
