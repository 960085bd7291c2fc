"""Every optimizer that Optax has gives Optax's numbers: 5 random trees, 10 steps, float64, to 1e-12."""

import numpy as np
import pytest

from tests.numerics.trajectories import FOLDER, all_cases, run_funzero, stored

CASES = all_cases()


@pytest.mark.parametrize("name", CASES)
def test_equals_optax(name):
    want, found = stored(name), dict(run_funzero(CASES[name]))
    assert found.keys() == want.keys()
    for key, value in want.items():
        scale = max(1.0, float(np.abs(value).max(initial=0.0)))
        assert np.abs(found[key] - value).max(initial=0.0) <= 1e-12 * scale, key


def test_every_file_has_its_case():
    assert {p.stem for p in FOLDER.glob("*.npz")} == set(CASES)
