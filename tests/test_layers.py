"""The package keeps its shape: imports go downward, libraries stay at home, functions and modules stay small.

Everything is read from the source with `ast`: an import inside a function or under TYPE_CHECKING counts too.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import llmprofile

PACKAGE = Path(llmprofile.__file__).parent

# The floors of the package, lowest first: a module imports from floors below its own.
LAYERS = (
    ("errors", "markup", "units"),
    ("answers", "api", "capture", "clock", "http1", "inversion", "latency", "laws", "lindley", "machine"),
    ("bisection", "stages", "traces"),
    ("prompts", "proxies", "queueing", "records", "sse"),
    ("link", "reading", "workload"),
    ("batches", "conventional", "gated", "metrics", "parsing", "preflight", "selfreport", "stamped", "style"),
    ("collect", "importers", "jobs", "scenario", "scrape", "slo", "steady", "worker"),
    ("fitting",),
    ("loopfit", "sweep"),
    ("bias",),
    ("comparison", "estimate"),
    ("trust",),
    ("live", "windows"),
    ("explore", "widgets"),
    ("supervise",),
    ("launch",),
    ("capacity",),
    ("saturation",),
    ("runplots", "serverplots"),
    ("queueplots",),
    ("plots",),
    ("htmlreport",),
    ("__init__",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
# The reference server stands beside them, on the lowest two floors, with floors of its own.
SERVER_SIDE = (
    ("asked", "pacing", "sockets", "truth"),
    ("replies",),
    ("streams",),
    ("server", "serving"),
)
SERVER_STANDS_ON = {module for layer in LAYERS[:2] for module in layer}
USES_THE_SERVER = {"__init__", "demo", "cli", "__main__"}

EVERYWHERE = {"numpy", "pandas"}
HOMES = {
    "aiohttp": {"conventional"},
    "httptools": {"http1"},
    "ipywidgets": {"explore", "widgets"},
    "IPython": {"widgets"},
    "joblib": {"supervise"},
    "matplotlib": {"queueplots", "runplots", "serverplots", "style"},
    "pyarrow": {"capture", "collect", "live", "parsing", "records", "scrape", "traces"},
    "scipy": {
        *("batches", "bias", "bisection", "fitting", "gated", "inversion"),
        *("laws", "loopfit", "metrics", "queueing", "scenario", "steady", "sweep"),
    },
    "tokenizers": {"selfreport"},
    "tqdm": {"capacity", "supervise"},
}

LONGEST_FUNCTION = 40  # lines of its body
LONGEST_MODULE = 400  # lines of code; aim below 300
UNWANTED_ENDINGS = ("Config", "Factory", "Manager", "Mixin")

Sources = dict[str, str]
Check = Callable[[Sources], list[str]]


def package_sources() -> Sources:
    """Return module name to text, for every module of the package."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("*.py"))}


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield (top-level package, module of ours or "") of every import statement, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _named(alias.name, "__init__")
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["llmprofile" if node.level else "", node.module]))
            for alias in node.names:
                yield from _named(module, alias.name)


def _named(module: str, name: str) -> Iterator[tuple[str, str]]:
    top, _, rest = module.partition(".")
    if top != "llmprofile":
        yield top, ""
    elif rest:
        yield top, rest.split(".")[0]
    else:  # a module of ours, or something that __init__ holds
        yield top, name if name in floors() else "__init__"


def floors() -> dict[str, tuple[bool, int]]:
    """Return each listed module's (on the server's side, floor)."""
    main = {module: (False, floor) for floor, layer in enumerate(LAYERS) for module in layer}
    return main | {module: (True, floor) for floor, layer in enumerate(SERVER_SIDE) for module in layer}


def may_import(module: str, other: str) -> bool:
    """Say whether an arrow from one of our modules to another points downward."""
    (server, floor), (other_server, other_floor) = floors()[module], floors()[other]
    if server == other_server:
        return other_floor < floor
    return other in SERVER_STANDS_ON if server else module in USES_THE_SERVER


def unlisted_modules(sources: Sources) -> list[str]:
    return [f"{module} is on no floor" for module in sources if module not in floors()]


def forbidden_arrows(sources: Sources) -> list[str]:
    arrows = {
        (module, other)
        for module, source in sources.items()
        for _, other in imports(source)
        if module in floors() and other
    }
    return [
        f"{module} imports {other}"
        for module, other in sorted(arrows)
        if other not in floors() or not may_import(module, other)
    ]


def libraries_abroad(sources: Sources) -> list[str]:
    known = EVERYWHERE | {"llmprofile"} | sys.stdlib_module_names
    abroad = {
        (module, library)
        for module, source in sources.items()
        for library, _ in imports(source)
        if library not in known and module not in HOMES.get(library, ())
    }
    return [f"{module} imports {library}" for module, library in sorted(abroad)]


def hidden_imports(sources: Sources) -> list[str]:
    """Find imports by name, which this file can't follow; `__init__` loads its names with them."""
    return [
        f"{module} imports by name in line {node.lineno}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if module != "__init__" and getattr(node, "attr", getattr(node, "id", "")) in {"import_module", "__import__"}
    ]


def long_functions(sources: Sources) -> list[str]:
    return [
        f"{module}.{node.name} has {body_lines(node)} lines"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > LONGEST_FUNCTION
    ]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.body[-1].end_lineno - body[0].lineno + 1 if body else 0


def long_modules(sources: Sources) -> list[str]:
    counted = {module: code_lines(source) for module, source in sources.items()}
    return [f"{module} has {lines} lines of code" for module, lines in counted.items() if lines > LONGEST_MODULE]


def code_lines(source: str) -> int:
    """Return the number of lines that hold more than comment, docstring or nothing."""
    lines: set[int] = set()
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def unwanted_classes(sources: Sources) -> list[str]:
    return [
        f"{module} has a class {node.name}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name.endswith(UNWANTED_ENDINGS)
    ]


def bare_excepts(sources: Sources) -> list[str]:
    return [
        f"{module} has a bare except in line {node.lineno}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


CHECKS = (
    unlisted_modules,
    forbidden_arrows,
    libraries_abroad,
    hidden_imports,
    long_functions,
    long_modules,
    unwanted_classes,
    bare_excepts,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_passes(check: Check) -> None:
    assert check(package_sources()) == []


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        (unlisted_modules, "helpers", ""),
        (forbidden_arrows, "units", "import llmprofile.launch"),
        (forbidden_arrows, "units", "from llmprofile.launch import run_load"),
        (forbidden_arrows, "units", "from llmprofile import launch"),
        (forbidden_arrows, "units", "import llmprofile as lp"),
        (forbidden_arrows, "units", "from llmprofile import run_load"),
        (forbidden_arrows, "units", "from . import launch"),
        (forbidden_arrows, "units", "from .launch import run_load"),
        (forbidden_arrows, "units", "def f():\n    from llmprofile.launch import run_load"),
        (forbidden_arrows, "units", "if TYPE_CHECKING:\n    from llmprofile.launch import run_load"),
        (forbidden_arrows, "units", "from llmprofile.errors import UsageError"),
        (forbidden_arrows, "units", "from llmprofile.helpers import help_out"),
        (forbidden_arrows, "stamped", "from llmprofile.conventional import ConventionalClient"),
        (forbidden_arrows, "launch", "from llmprofile.server import ReferenceServer"),
        (forbidden_arrows, "serving", "from llmprofile.stamped import StampedClient"),
        (forbidden_arrows, "server", "from llmprofile.serving import main"),
        (libraries_abroad, "stamped", "import aiohttp.client"),
        (libraries_abroad, "metrics", "def f():\n    from matplotlib import pyplot"),
        (libraries_abroad, "metrics", "import requests"),
        (hidden_imports, "units", "import importlib\nimportlib.import_module('llmprofile.launch')"),
        (hidden_imports, "units", "__import__('llmprofile.launch')"),
        (long_functions, "units", "def f():\n" + "    pass\n" * 41),
        (long_functions, "units", "class A:\n  async def f(self):\n    '''Say.'''\n" + "    pass\n" * 41),
        (long_modules, "units", "x = 1\n" * 401),
        (unwanted_classes, "units", "class RunConfig: pass"),
        (bare_excepts, "units", "try:\n    pass\nexcept:\n    pass"),
    ],
)
def test_check_finds_what_it_is_for(check: Check, module: str, source: str) -> None:
    assert len(check({module: source})) == 1


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        (forbidden_arrows, "launch", "from llmprofile.units import s_to_ns\nfrom . import errors"),
        (forbidden_arrows, "serving", "from llmprofile.units import s_to_ns\nfrom llmprofile import streams"),
        (forbidden_arrows, "demo", "import llmprofile as lp\nfrom llmprofile.server import ReferenceServer"),
        (libraries_abroad, "conventional", "import aiohttp, numpy, json\nfrom llmprofile import units"),
        (long_functions, "units", "def f():\n    '''Say\n" + "much\n" * 50 + "    '''\n" + "    pass\n" * 40),
        (long_modules, "units", "x = 1  # one\n\n# two\n" * 400 + "'''three\nfour'''\n"),
    ],
)
def test_check_lets_pass_what_is_right(check: Check, module: str, source: str) -> None:
    assert check({module: source}) == []


def test_no_module_has_the_name_of_something_public() -> None:
    public = {name for name in llmprofile.__all__ if not isinstance(getattr(llmprofile, name), ModuleType)}
    assert public
    assert public.isdisjoint(package_sources())


def test_the_floors_of_the_table_are_disjoint() -> None:
    listed = [module for layer in LAYERS + SERVER_SIDE for module in layer]
    assert sorted(listed) == sorted(floors())
