"""The examples in docstrings run as they read."""

import doctest
import importlib
import pkgutil

import pytest

import funzero

MODULES = [m.name for m in pkgutil.walk_packages(funzero.__path__, "funzero.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name} fail"


def test_there_are_examples():
    attempted = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert attempted >= 20
