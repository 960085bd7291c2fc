"""Which folders ship under which name, and the compiled CPU kernels; pyproject.toml holds the rest.

A wheel made where there is a C++ compiler has the kernels' library in it and is for this platform; without a compiler it
is made all the same, and for any platform. Either way, what is missing is built at first use.
"""

import runpy
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SHIPPED = {"funzero": "funzero", "funzero_kernels": "kernels", "funzero_examples": "examples"}
BUILD = runpy.run_path(str(Path(__file__).parent / "kernels" / "cpu" / "build.py"))


def command() -> list[str] | None:
    """A C++ compiler, if there is one."""
    try:
        found: list[str] = BUILD["compiler"]()
        return found
    except BUILD["BuildError"]:
        return None


class WithKernels(build_py):
    """Compiles the kernels beside their sources, unless those are used in place."""

    def run(self) -> None:
        """Copies the packages, then compiles."""
        super().run()
        if self.editable_mode or command() is None:
            return
        try:
            BUILD["build"](Path(self.build_lib, "funzero_kernels", "cpu"), BUILD["digest"](), command())
        except BUILD["BuildError"] as error:
            self.warn(f"the CPU kernels are not in this build: {error}")


class ForPlatform(bdist_wheel):
    """The library is loaded by ctypes, so that a wheel fits every Python of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3; this platform if there is a library to ship."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class MaybeCompiled(Distribution):
    """Says whether the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        """Whether the kernels can be compiled."""
        return command() is not None


setup(
    package_dir=SHIPPED,
    packages=[
        package
        for name, folder in SHIPPED.items()
        if Path(folder, "__init__.py").exists()
        for package in [name, *(f"{name}.{sub}" for sub in find_packages(folder))]
    ],
    cmdclass={"build_py": WithKernels, "bdist_wheel": ForPlatform},
    distclass=MaybeCompiled,
)
