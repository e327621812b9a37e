"""The limits that the guides Security and Quotas state are options with those defaults."""

from __future__ import annotations

import re

import pytest

from penstock.node.config import SECTIONS
from penstock.store.options import options_of
from tests.layout import ROOT

GUIDES = "".join((ROOT / "docs" / "guides" / name).read_text("utf-8") for name in ("security.md", "quotas.md"))
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
