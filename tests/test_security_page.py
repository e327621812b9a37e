"""The limits that the guides Security and Quotas state are options with those defaults. Each attack is on its page."""

from __future__ import annotations

import re

import pytest

from penstock.node.config import SECTIONS
from penstock.store.options import options_of
from tests.attack.catalogue import ATTACKS
from tests.layout import ROOT

GUIDES = "".join((ROOT / "docs" / "guides" / name).read_text("utf-8") for name in ("security.md", "quotas.md"))
ATTACK_PAGE = (ROOT / "tests" / "attack" / "README.md").read_text("utf-8")
LIMITS: list[tuple[str, str]] = re.findall(r"^\| [^|]+ \| `((?:\w+\.)+\w+)` \| (\d+\w*)", GUIDES, re.MULTILINE)
OPTIONS: list[str] = re.findall(r"`((?:mqtt|pop|store|timer|access|quotas)(?:\.\w+)+)`", GUIDES)


@pytest.mark.parametrize(("option", "default"), LIMITS)
def test_a_limit_has_the_default_that_the_page_states(option: str, default: str) -> None:
    section, _, name = option.rpartition(".")
    (declared,) = (each for each in options_of(SECTIONS[section]) if each.name == name)
    assert str(declared.written(declared.default)) == default


def test_the_tables_of_limits_are_found() -> None:
    assert len(LIMITS) > 20
    assert set(OPTIONS) >= {option for option, _ in LIMITS}


@pytest.mark.parametrize("name", ATTACKS)
def test_the_page_has_what_each_attack_is_and_what_it_does_to_others(name: str) -> None:
    attack = ATTACKS[name]
    assert f"| `{name}` | {attack.summary} | {attack.must_get} |" in ATTACK_PAGE
    assert re.search(rf"^\| `{name}` \|( [^|]+ → [^|]+ \|){{6}} 0 of ", ATTACK_PAGE, re.MULTILINE)
