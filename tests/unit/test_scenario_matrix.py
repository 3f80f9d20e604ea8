"""What of the scenarios' matrix is left for each run: no version and no mode goes without a test."""

from __future__ import annotations

from itertools import product

import pytest

from tests.scenario_matrix import others_of

MODES = [(2, "on"), (3, "on"), (4, "on"), (4, "parallel")]


@pytest.mark.parametrize(
    "modes", [MODES, MODES[1:], [MODES[0], MODES[-1]]], ids=["all", "two-phase", "extremes"]
)
@pytest.mark.parametrize("versions", [[16, 18], [16, 17, 18]])
def test_each_version_and_each_mode_is_left_and_about_half_of_the_pairs(
    versions: list[int], modes: list[tuple[int, str]]
) -> None:
    pairs = set(product(versions, modes))
    left = pairs - others_of(pairs)
    assert {version for version, _ in left} == set(versions)
    assert {mode for _, mode in left} == set(modes)
    assert len(left) == (len(pairs) + 1) // 2


def test_all_is_left_of_a_test_with_one_version_or_one_mode() -> None:
    for pairs in (set(product([18], MODES)), set(product([16, 18], MODES[:1]))):
        assert others_of(pairs) == set()
