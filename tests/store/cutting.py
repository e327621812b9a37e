"""Logs that end at any position, as a power cut may leave them."""

from __future__ import annotations

from pathlib import Path


def cut_log(data_dir: Path, cut: int, garbage: bytes, segment_bytes: int) -> None:
    """Truncate a log at `cut`, and append the garbage, as far as it fits into the segment."""
    oldest, *younger = sorted((data_dir / "commitlog").iterdir())
    for path in (*reversed(younger), oldest):
        base = int(path.stem)
        if base > cut or (base == cut and path != oldest):
            path.unlink()
            continue
        data = path.read_bytes()[: cut - base] + garbage
        path.write_bytes(data[:segment_bytes])
        return
