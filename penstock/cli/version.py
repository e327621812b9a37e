"""The version of Penstock as people report it: that of a checkout names its commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock import __version__

ROOT = Path(__file__).parents[2]
"""Folder of the checkout, or the folder of all packages where Penstock is installed."""

GIT_S = 2.0
"""Seconds that git has to say whether files were modified."""


def version_text(root: Path = ROOT) -> str:
    """Return the version, and the commit of a checkout."""
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return f"penstock {__version__}"
    commit = _commit_of(root)
    if commit is None:
        return f"penstock {__version__} (checkout of an unknown commit)"
    return f"penstock {__version__} (checkout {commit[:7]}{_modified(root)})"


def _commit_of(root: Path) -> str | None:
    """Return the commit that is checked out; None if the files of git do not say it."""
    try:
        directory = root / ".git"
        if directory.is_file():  # of a worktree
            directory = root / directory.read_text().removeprefix("gitdir:").strip()
        head = (directory / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        reference = head.removeprefix("ref: ")
        shared = directory
        if (directory / "commondir").exists():
            shared = directory / (directory / "commondir").read_text().strip()
        if (shared / reference).exists():
            return (shared / reference).read_text().strip()
        lines = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in lines if line.endswith(f" {reference}")), None)
    except (OSError, ValueError):
        return None


def _modified(root: Path) -> str:
    """Return what git says of the files, to be put behind the commit."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ", perhaps modified"
    return ", modified" if ended.stdout else ""
