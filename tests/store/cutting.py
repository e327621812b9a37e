"""Logs that end where a test says, as a power cut leaves them."""

from __future__ import annotations

from pathlib import Path


def cut_log(data_dir: Path, cut: int, garbage: bytes, segment_bytes: int) -> None:
    """Leave of a log what lies before `cut`, with garbage behind it as far as the last segment goes."""
    oldest, *younger = sorted((data_dir / "commitlog").iterdir())
    for path in (*reversed(younger), oldest):
        base = int(path.stem)
        if base > cut or (base == cut and path != oldest):
            path.unlink()
            continue
        data = path.read_bytes()[: cut - base] + garbage
        path.write_bytes(data[:segment_bytes])
        return
