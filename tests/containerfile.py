"""The instructions of deploy/container/Containerfile, as tests read and follow them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "deploy" / "container" / "Containerfile"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, with its continued lines as one."""

    name: str
    """In capitals, such as RUN."""
    text: str
    """What comes after the name."""

    def command(self) -> list[str]:
        """Return the words of the command in its form as a JSON array, which follows the options of a HEALTHCHECK."""
        words: list[str] = json.loads(self.text[self.text.index("[") :])
        return words


def stages() -> list[list[Instruction]]:
    """Return the instructions of each stage. Each begins with FROM."""
    lines = "\n".join(line for line in FILE.read_text("utf-8").splitlines() if not line.startswith("#"))
    found: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        name, _, text = line.partition(" ")
        if name == "FROM":
            found.append([])
        if name:
            found[-1].append(Instruction(name, text.strip()))
    return found


def last_of(name: str) -> Instruction:
    """Return the last instruction of this name in the image."""
    return [each for each in stages()[-1] if each.name == name][-1]


def variables() -> dict[str, str]:
    """Return the variables of the image."""
    words = [word for each in stages()[-1] if each.name == "ENV" for word in shlex.split(each.text)]
    return dict(word.split("=", 1) for word in words)
