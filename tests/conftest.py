"""One thread, repeatable hypothesis, and pools of ranks that end with the session."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests import ranks

torch.set_num_threads(1)
hypothesis.settings.register_profile("funzero", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("funzero")


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    ranks.close_all()
