"""Which folders ship under which name; pyproject.toml holds the rest, but cannot find packages and rename them too."""

from pathlib import Path

from setuptools import find_packages, setup

SHIPPED = {"funzero": "funzero", "funzero_kernels": "kernels", "funzero_examples": "examples"}

setup(
    package_dir=SHIPPED,
    packages=[
        package
        for name, folder in SHIPPED.items()
        if Path(folder, "__init__.py").exists()
        for package in [name, *(f"{name}.{sub}" for sub in find_packages(folder))]
    ],
)
