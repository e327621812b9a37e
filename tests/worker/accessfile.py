"""An access file for one service."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def access_file(path: Path, token: str, write: str = "#", consume: str = "*") -> Path:
    """Write an access file with one service. It may publish to the topics of a filter, and consume as one group or as any."""
    digest = sha256(token.encode()).hexdigest()
    path.write_text(
        f'[[principal]]\nname = "billing"\ntoken_sha256 = "{digest}"\nwrite = ["{write}"]\nread = ["#"]\n'
        f'consume = ["{consume}"]\nadmin = ["*"]\n'
    )
    return path
