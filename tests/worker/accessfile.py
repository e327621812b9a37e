"""An access file for one service."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def access_file(path: Path, token: str, write: str = "#") -> Path:
    """Write an access file in which one service has a token, and may publish to the topics of a filter."""
    digest = sha256(token.encode()).hexdigest()
    path.write_text(
        f'[[principal]]\nname = "billing"\ntoken_sha256 = "{digest}"\nwrite = ["{write}"]\nread = ["#"]\n'
        'consume = ["*"]\nadmin = ["*"]\n'
    )
    return path
