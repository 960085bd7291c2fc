"""The house's budgets and layers, read from the syntax trees: no exclusion list."""

import ast
import graphlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = {path: ast.parse(path.read_text()) for top in ("funzero", "kernels") for path in (ROOT / top).rglob("*.py")}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in TREES}

BOTTOM = {"core", "_compat"}
PURE = BOTTOM | {"transforms", "zero", "data"}
RUN = PURE | {"executor", "parallel"}
# What each part may import; parts that are not named are the facade and may import everything.
LAYERS = {
    "_compat": {"_compat"},
    "core": BOTTOM,
    "transforms": PURE,
    "zero": PURE,
    "data": PURE,
    "executor": PURE | {"executor"},
    "parallel": PURE | {"parallel"},
    "checkpoint": RUN | {"checkpoint"},
    "integrations": RUN | {"checkpoint", "integrations"},
    "planning": RUN | {"planning"},
}
HEAVY = (
    "optree",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "safetensors",
    "triton",
)

PROBE = """
import json, os, sys
import torch
before, environ, reads = set(sys.modules), dict(os.environ), []
get = os._Environ.__getitem__
def spy(self, key):
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith("<frozen") or frame.f_code.co_filename == os.__file__:
        frame = frame.f_back
    reads.append(f"{frame.f_code.co_filename}:{frame.f_lineno} reads {key}")
    return get(self, key)
os._Environ.__getitem__ = spy
import funzero
os._Environ.__getitem__ = get
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "reads": reads,
    "changed": sorted(key for key, _ in environ.items() ^ dict(os.environ).items()),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def spot(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{spot(path, node.lineno)} {node.name}", node


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module imports, function-local imports included."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"  # `import torch` alone gives access to it


def longest(name: str, known: Iterable[str]) -> str | None:
    """The longest of the known dotted names that is `name` or a parent of it."""
    return max((each for each in known if f"{name}.".startswith(f"{each}.")), key=len, default=None)


def edges() -> Iterator[tuple[str, int, str]]:
    """Module, line, and the funzero module that it imports there."""
    for module in MODULES:
        for line, name in imports(module):
            target = longest(name, MODULES) or name
            if target.split(".")[0] == "funzero":
                yield module, line, target


def part(module: str) -> str:
    return (module.split(".") + [""])[1]


def test_files_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in TREES}
    assert not [f"{spot(path, length)} is past line 400" for path, length in lengths.items() if length > 400]


def test_functions_are_short():
    def length(node):
        doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
        return node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)

    assert not [f"{where}: {length(node)} lines, at most 60" for where, node in functions() if length(node) > 60]


def test_functions_take_few_arguments():
    def count(args):
        return len(args.posonlyargs + args.args) + sum(default is None for default in args.kw_defaults)

    long = {where: count(node.args) for where, node in functions()}
    assert not [f"{where}: {n} positional or required arguments, at most 8" for where, n in long.items() if n > 8]


def test_no_import_cycle():
    lines = {(module, target): line for module, line, target in edges() if module != target}
    graph: dict[str, set[str]] = {}
    for module, target in lines:
        graph.setdefault(module, set()).add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        ring = error.args[1][::-1]  # graphlib lists what is imported before what imports it
        steps = [f"{spot(MODULES[a], lines[a, b])} imports {b}" for a, b in itertools.pairwise(ring)]
        pytest.fail("import cycle: " + ", ".join(steps))


def test_layers():
    assert not [
        f"{spot(MODULES[module], line)}: {part(module)} may not import {target}"
        for module, line, target in edges()
        if module.split(".")[0] == "funzero" and part(target) not in LAYERS.get(part(module), {part(target)})
    ]


def test_kernels_are_a_leaf():
    assert not [spot(MODULES[a], line) for a, line, _ in edges() if a.split(".")[0] == "kernels"], "imports funzero"


def test_kernels_have_one_importer():
    assert not [
        f"{spot(MODULES[module], line)}: only funzero/executor/dispatch.py may import {name}"
        for module in MODULES
        for line, name in imports(module)
        if module.split(".")[0] == "funzero" and module != "funzero.executor.dispatch"
        if name.split(".")[0] in ("kernels", "funzero_kernels")
    ]


@pytest.mark.parametrize("heavy", HEAVY)
def test_one_importer(heavy):
    found = [
        (module, spot(MODULES[module], line))
        for module in MODULES
        for line, name in imports(module)
        if module.split(".")[0] == "funzero" and longest(name, HEAVY) == heavy
    ]
    assert len({module for module, _ in found}) <= 1, f"{heavy} is imported at {[where for _, where in found]}"


@pytest.fixture(scope="module")
def probe():
    if "funzero" not in MODULES:
        pytest.skip("there is no funzero/__init__.py")
    out = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def test_import_touches_no_gpu(probe):
    assert not probe["cuda"], "import funzero initialises CUDA"


def test_import_reads_and_writes_no_environment(probe):
    assert not [read for read in probe["reads"] if read.startswith(str(ROOT / "funzero"))]
    assert not probe["changed"], "import funzero changes these environment variables"


def test_import_stays_light(probe):
    optional = {"triton", "matplotlib", "rich", "transformers", "ray", "tensorboard"}
    assert not optional & {name.split(".")[0] for name in probe["modules"]}, "import funzero imports these"
