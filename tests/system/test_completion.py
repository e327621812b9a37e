"""The script of `penstock completion`, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.processes import run_penstock
from tests.waiting import PROCESS_S

pytest.importorskip("shtab")

COMPLETE = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
$(complete -p penstock | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    ended = run_penstock("completion", "bash")
    assert ended.returncode == 0, ended.stderr
    file = tmp_path / "penstock.bash"
    file.write_text(ended.stdout)
    return file


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("penstock to", ["top", "topics"]),
        ("penstock group re", ["reset", "resume"]),
        ("penstock pub --mqtt-v", ["--mqtt-version"]),
        ("penstock pub --qos ''", ["0", "1", "2"]),
        ("penstock top --sort o", ["oldest"]),
    ],
)
def test_bash_completes_commands_options_and_choices(script: Path, words: str, expected: list[str]) -> None:
    command = ["bash", "-c", COMPLETE.format(script=script, words=words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert sorted(word.strip() for word in ended.stdout.split()) == expected, ended.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts_of_their_own(shell: str) -> None:
    ended = run_penstock("completion", shell)
    assert ended.returncode == 0, ended.stderr
    assert "penstock" in ended.stdout
