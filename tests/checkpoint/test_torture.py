"""A reduced count of what `make torture` runs."""

import pytest

from tests import torture


@pytest.mark.timeout(240)
def test_kills_at_random_moments_leave_a_complete_checkpoint():
    count, hits = torture.kills(30, until_hits=3, seed=1)
    assert hits == 3, f"most of {count} kills were meant to hit a save"


def test_a_file_that_grows_too_large():
    assert "File too large" in torture.file_limit()


def test_a_disk_that_is_full():
    text = torture.small_disk_case()
    if text.startswith("not run"):
        pytest.skip(text)
    assert "No space left" in text
