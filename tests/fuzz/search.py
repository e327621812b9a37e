"""Timed searches: Hypothesis generates inputs until the time is over, and shrinks an input that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.codec import check_codec
from tests.fuzz.inputs import VARIANTS, Attack, attacks, damaged, framed, known, mqtt, proxied, variants, variants_of
from tests.fuzz.target import Target, deadline

T = TypeVar("T")

ENDLESS = 10**9

BATCH = 1000
"""The number of inputs of one search. Hypothesis remembers all of them, so a long run consists of many searches."""


def search(strategy: st.SearchStrategy[T], check: Callable[[T], object], seconds: float, examples: int = ENDLESS) -> int:
    """Check inputs until the time or `examples` is used up; return how many. Raise the error of the smallest failing one."""
    until_s = time.monotonic() + seconds
    count = 0

    @settings(
        max_examples=min(BATCH, examples),
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=True,
    )
    @given(strategy)
    def run(value: T) -> None:
        nonlocal count
        if time.monotonic() < until_s and count < examples:
            check(value)
            count += 1

    while time.monotonic() < until_s and count < examples:
        run()
    return count


def search_codec(seconds: float, examples: int = ENDLESS) -> int:
    """Check the codec; return the number of inputs with their variants. `examples` bounds the inputs of Hypothesis."""

    def check(seeded: tuple[bytes, int]) -> None:
        data, seed = seeded
        for variant in variants(data, Random(seed)):
            with deadline():
                check_codec(variant)

    data = mqtt() | damaged(known()) | framed() | proxied()
    return search(st.tuples(data, st.integers(0, 2**32)), check, seconds, examples) * (1 + VARIANTS)


def search_listener(
    target: Target, seconds: float, examples: int = ENDLESS, told: Callable[[Target], None] | None = None
) -> int:
    """Attack a node; return the number of attacks with their variants. `told` is called now and then."""

    def check(attack: Attack) -> None:
        for variant in variants_of(attack):
            target.attack(variant)
        if told is not None:
            told(target)

    return search(attacks(), check, seconds, examples) * (1 + VARIANTS)
