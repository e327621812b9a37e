"""The reference pages of the documentation are what the code says."""

from __future__ import annotations

import pytest

from tests.reference import DIRECTORY, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_committed_page_is_what_the_code_says(name: str) -> None:
    assert (DIRECTORY / name).read_text() == PAGES[name](), "run python -m tests.reference"
