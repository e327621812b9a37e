"""docs/security.md: its limits are options with those defaults, and its table has each attack of the suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.node.config import SECTIONS
from penstock.store.options import options_of
from tests.attack.catalogue import ATTACKS

PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text("utf-8")
LIMITS: list[tuple[str, str]] = re.findall(r"^\| [^|]+ \| `((?:\w+\.)+\w+)` \| (\d+\w*)", PAGE, re.MULTILINE)
OPTIONS: list[str] = re.findall(r"`((?:mqtt|pop|store|timer|access|quotas)(?:\.\w+)+)`", PAGE)


@pytest.mark.parametrize(("option", "default"), LIMITS)
def test_a_limit_has_the_default_that_the_page_states(option: str, default: str) -> None:
    section, _, name = option.rpartition(".")
    (declared,) = (each for each in options_of(SECTIONS[section]) if each.name == name)
    assert str(declared.written(declared.default)) == default


def test_the_table_of_limits_is_found() -> None:
    assert len(LIMITS) > 20
    assert set(OPTIONS) >= {option for option, _ in LIMITS}


@pytest.mark.parametrize("name", ATTACKS)
def test_the_page_has_what_each_attack_is_and_what_it_does_to_others(name: str) -> None:
    attack = ATTACKS[name]
    assert f"| `{name}` | {attack.summary} | {attack.must_get} |" in PAGE
    assert re.search(rf"^\| `{name}` \|( [^|]+ → [^|]+ \|){{6}} 0 of ", PAGE, re.MULTILINE)
