"""Which module may import which, read from the syntax tree of every module.

    engines      nothing of ours
    export       the formats and errors of engines
    runtime      engines
    calibration  export, engines, runtime
    src          everything, but lazily: `--help` must not wait for an engine library

and no module on the way from a bundle to tokens reaches torch, transformers or onnx.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("export", "engines", "runtime", "calibration")

MAY_IMPORT = {
    "engines": ("spec_export.engines",),
    "export": (
        "spec_export.export",
        "spec_export.engines.atomic",
        "spec_export.engines.errors",
        "spec_export.engines.extras",
        "spec_export.engines.graphs",
        "spec_export.engines.hashing",
        "spec_export.engines.manifest",
        "spec_export.engines.strict",
        "spec_export.engines.versions",
    ),
    "runtime": ("spec_export.runtime", "spec_export.engines"),
    "calibration": tuple(f"spec_export.{room}" for room in ROOMS),
}

TRACING = {"torch", "transformers", "optimum", "safetensors", "gguf"}
ONNX = {"onnx", "onnx_ir", "onnxscript"}
ENGINE_LIBRARIES = {"onnxruntime", "tensorrt", "tensorrt_rtx", "polygraphy"}
# Building on the device reads and rewrites ONNX; these may import it at their head.
BUILD_ONLY = {
    f"spec_export.engines.{name}"
    for name in (
        "activations",
        "awq",
        "build",
        "caches",
        "graph_edits",
        "lower",
        "modelopt",
        "prepare",
        "probe",
        "products",
        "quantize",
        "reference",
        "retype",
        "trt_memory",
        "trt_plan",
        "trt_prepare",
        "weight_blocks",
        "weight_files",
        "weight_formats",
    )
}


@dataclass(frozen=True)
class Import:
    """One imported name: where it stands, and whether importing the module runs it."""

    target: str  # dotted, absolute
    line: int
    at_import: bool


def imports_of(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """Every import of a module, `from a import b` counted as `a.b`."""
    package = module if is_package else module.rpartition(".")[0]
    return list(_walk(ast.parse(source), package, at_import=True))


def _walk(node: ast.AST, package: str, *, at_import: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for name in node.names:
            yield Import(name.name, node.lineno, at_import)
    elif isinstance(node, ast.ImportFrom):
        for name in node.names:
            yield Import(f"{_origin(node, package)}.{name.name}", node.lineno, at_import)
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            yield from _walk(child, package, at_import=False)
        for child in node.orelse:
            yield from _walk(child, package, at_import=at_import)
    else:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, package, at_import=at_import and not is_function)


def _origin(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parents = package.split(".")
    base = parents[: len(parents) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _within(target: str, packages: tuple[str, ...]) -> bool:
    return any(target == package or target.startswith(package + ".") for package in packages)


def _top(target: str) -> str:
    return target.partition(".")[0]


def forbidden_edges(room: str, imports: list[Import]) -> list[Import]:
    """Imports of ours that a room may not have, lazy or not."""
    ours = [found for found in imports if _top(found.target) == "spec_export"]
    return [found for found in ours if not _within(found.target, MAY_IMPORT[room])]


def bare_imports(imports: list[Import]) -> list[Import]:
    """Imports of a folder by its bare name: a second module object beside spec_export's."""
    return [found for found in imports if _top(found.target) in ROOMS]


def eager_in_src(imports: list[Import], siblings: frozenset[str]) -> list[Import]:
    """What a module of the root package imports at its head and should import where it is used."""
    light = (
        *(f"spec_export.{name}" for name in siblings),
        "spec_export.engines.byte_counts",
        "spec_export.engines.errors",
    )
    heavy = {"numpy", "tokenizers", *TRACING, *ONNX, *ENGINE_LIBRARIES}
    return [
        found
        for found in imports
        if found.at_import
        and (
            _top(found.target) in heavy
            or (_top(found.target) == "spec_export" and not _within(found.target, light))
        )
    ]


def _sources() -> dict[str, tuple[Path, list[Import]]]:
    found: dict[str, tuple[Path, list[Import]]] = {}
    folders = {"spec_export": ROOT / "src" / "spec_export"}
    folders |= {f"spec_export.{room}": ROOT / room for room in ROOMS}
    for package, folder in folders.items():
        for path in sorted(folder.glob("*.py")):
            is_package = path.stem == "__init__"
            module = package if is_package else f"{package}.{path.stem}"
            source = path.read_text(encoding="utf-8")
            found[module] = (path, imports_of(source, module, is_package=is_package))
    return found


SOURCES = _sources()
SRC_MODULES = sorted(name for name in SOURCES if not _within(name, MAY_IMPORT["calibration"]))
ON_DEVICE = sorted(
    name for name in SOURCES if _within(name, MAY_IMPORT["runtime"]) and name not in BUILD_ONLY
)


def _at(module: str, imports: list[Import]) -> list[str]:
    path = SOURCES[module][0].relative_to(ROOT)
    return [f"{path}:{found.line}: {found.target}" for found in imports]


def imported_at_import(module: str, graph: dict[str, list[Import]]) -> dict[str, str]:
    """Third-party packages that importing a module brings in, each with who brings it."""
    brought: dict[str, str] = {}
    waiting, seen = [module], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        parents = current.split(".")[:-1]
        waiting += [".".join(parents[: n + 1]) for n in range(len(parents))]
        for found in graph.get(current, []):
            if not found.at_import:
                continue
            if _top(found.target) == "spec_export":
                waiting += _modules_behind(found.target, graph)
            else:
                brought.setdefault(_top(found.target), f"{current}:{found.line}")
    return brought


def _modules_behind(target: str, graph: dict[str, list[Import]]) -> list[str]:
    """The module a dotted name is, or the one it is an attribute of."""
    parts = target.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return [next(prefix for prefix in prefixes if prefix in graph)]


def test_every_package_was_read():
    assert {"spec_export", *(f"spec_export.{room}" for room in ROOMS)} <= set(SOURCES)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    wrong = [
        line
        for module, (_, imports) in SOURCES.items()
        if _within(module, (f"spec_export.{room}",))
        for line in _at(module, forbidden_edges(room, imports))
    ]
    assert not wrong, f"{room} may import {MAY_IMPORT[room]}"


@pytest.mark.parametrize("module", SRC_MODULES)
def test_the_root_package_is_lazy(module):
    siblings = frozenset(name.rpartition(".")[2] for name in SRC_MODULES if "." in name)
    wrong = eager_in_src(SOURCES[module][1], siblings | {"__version__"})
    assert not _at(module, wrong), "import it inside the function that uses it"


@pytest.mark.parametrize("module", ON_DEVICE)
def test_opening_and_running_reaches_no_model_library(module):
    graph = {name: imports for name, (_, imports) in SOURCES.items()}
    brought = imported_at_import(module, graph)
    assert not {name: by for name, by in brought.items() if name in TRACING | ONNX}


def test_runtime_and_engines_never_trace_and_runtime_never_reads_onnx():
    """Not even inside a function: a device has no torch, and a runtime no onnx."""
    wrong = []
    for module, (_, imports) in SOURCES.items():
        unwanted = set()
        if _within(module, ("spec_export.engines",)):
            unwanted = TRACING
        elif _within(module, ("spec_export.runtime",)):
            unwanted = TRACING | ONNX
        wrong += _at(module, [found for found in imports if _top(found.target) in unwanted])
    assert not wrong


def test_no_folder_is_imported_by_its_bare_name():
    wrong = [line for name, (_, all_) in SOURCES.items() for line in _at(name, bare_imports(all_))]
    for folder in ("tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            imports = imports_of(path.read_text(encoding="utf-8"), f"{folder}.{path.stem}")
            wrong += [f"{path.relative_to(ROOT)}:{f.line}" for f in bare_imports(imports)]
    assert not wrong, "import spec_export.<folder>"


# Negative controls: each rule has to see what it is there for.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec_export.engines.ort", "from spec_export.runtime.session import Session"),
        ("spec_export.engines.ort", "from ..runtime import session"),
        ("spec_export.engines.ort", "def f():\n    from .. import export"),
        ("spec_export.engines.ort", "import spec_export.calibration"),
        ("spec_export.engines.ort", "from spec_export import __version__"),
        ("spec_export.export.pair", "from ..engines import ort"),
        ("spec_export.export.pair", "from ..engines.manifests import Manifest"),
        ("spec_export.export.pair", "import spec_export.engines"),
        ("spec_export.runtime.session", "from ..export.pair import export_pair"),
        ("spec_export.runtime.session", "if TYPE_CHECKING:\n    from ..calibration import theory"),
        ("spec_export.calibration.report", "from .. import cli"),
    ],
)
def test_a_forbidden_edge_is_seen(module, source):
    assert forbidden_edges(module.split(".")[1], imports_of(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec_export.engines.ort", "from . import errors\nfrom .backend import Engine"),
        ("spec_export.export.pair", "from ..engines.errors import PairError\nimport torch.export"),
        ("spec_export.export.pair", "from ..engines import graphs, manifest"),
        ("spec_export.runtime.session", "from ..engines.ort import OrtBackend"),
        (
            "spec_export.calibration.report",
            "from ..runtime import stats\nfrom .. import export",
        ),
    ],
)
def test_an_allowed_edge_passes(module, source):
    imports = imports_of(source, module)
    assert not forbidden_edges(module.split(".")[1], imports)
    assert not bare_imports(imports)


@pytest.mark.parametrize("source", ["import export", "from runtime.session import Session"])
def test_a_bare_import_is_seen(source):
    assert bare_imports(imports_of(source, "tests.test_x"))


@pytest.mark.parametrize(
    ("source", "is_eager"),
    [
        ("import numpy as np", True),
        ("try:\n    import torch\nexcept ImportError:\n    pass", True),
        ("class A:\n    from spec_export.runtime import session", True),
        ("from .engines import bundle", True),
        ("from .engines.errors import SpecExportError\nimport typer\nfrom . import demo", False),
        ("def f():\n    import numpy\n    from .engines import bundle", False),
        ("if TYPE_CHECKING:\n    from .runtime.session import Session", False),
    ],
)
def test_an_eager_import_is_seen(source, is_eager):
    imports = imports_of(source, "spec_export.cli")
    assert bool(eager_in_src(imports, frozenset({"cli", "demo"}))) == is_eager


def test_a_library_reached_through_another_module_or_a_package_head_is_seen():
    sources = {
        "spec_export": "",
        "spec_export.runtime": "",
        "spec_export.runtime.session": "from ..engines.ort import OrtBackend",
        "spec_export.engines": "from . import build",
        "spec_export.engines.build": "import onnx_ir as ir",
        "spec_export.engines.ort": "def f():\n    import onnx",
    }
    packages = {"spec_export", "spec_export.runtime", "spec_export.engines"}
    graph = {
        name: imports_of(source, name, is_package=name in packages)
        for name, source in sources.items()
    }
    assert imported_at_import("spec_export.runtime.session", graph) == {
        "onnx_ir": "spec_export.engines.build:1"
    }
