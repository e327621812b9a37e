"""Coverage-guided fuzzing of the codec with atheris: python -m tests.fuzz.guided SECONDS DIRECTORY.

The search starts from the shared tables of packets and from the inputs that earlier runs have kept in the directory. It leaves
an input that fails there.
"""

from __future__ import annotations

import importlib
import sys
from hashlib import sha256
from pathlib import Path

INPUT_S_MAX = 5
RSS_MIB_MAX = 1024


def fuzz(seconds: int, directory: Path) -> None:
    """Fuzz for `seconds`; end the process with a status other than 0 if an input fails."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["penstock.gateway", "penstock.store.topics"]):
        for name in ("connect", "decode", "disconnect", "encode", "plain", "subscribe"):
            importlib.import_module(f"penstock.gateway.protocol.{name}")
    from tests.fuzz.codec import check_codec
    from tests.fuzz.inputs import HEADERS, SEEDS

    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in (*SEEDS, *HEADERS):
        (corpus / sha256(seed).hexdigest()[:16]).write_bytes(seed)
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_S_MAX}",
        f"-rss_limit_mb={RSS_MIB_MAX}",
        f"-artifact_prefix={directory}/failed-",
        "-max_len=1024",
        "-print_final_stats=1",
        str(corpus),
    ]
    atheris.Setup(arguments, check_codec)
    atheris.Fuzz()


if __name__ == "__main__":
    fuzz(int(sys.argv[1]), Path(sys.argv[2]))
