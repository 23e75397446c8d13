"""The house: the size of files, columns, imports that run downward, public and private names."""

import ast
import io
import re
import tokenize
from collections.abc import Collection
from pathlib import Path

import pytest

import purestep as ps

HOME = Path(ps.__file__).parent
QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

OTHERS = {"__init__", "random", "remat", "state", "torch_private"}
"""The files at the top that are not the core."""

LONGEST = 400
"""Lines of code of a file."""

ORDER = [
    "types", "torch_private", "tree", "counts", "hints", "axis", "sharding", "objective",
    "compiling", "validation", "grads", "sync", "optim", "step", "evaluation", "random", "nn",
    "data", "remat", "losses", "state", "checkpoint", "testing", "examples",
]  # fmt: skip
"""Each imports from those before it alone."""

PRIVATE = 17
"""Private names of torch's."""

SEAMS = {
    "tree/tracing.py": 10, "tree/norms.py": 3, "tree/ops.py": 1, "tree/spec.py": 3,
    "axis/primitives.py": 1, "axis/mesh.py": 1, "axis/process.py": 2, "sharding/gather.py": 1,
    "sync/session.py": 2,
    "grads/accumulate.py": 4, "grads/functional.py": 2, "grads/grad_and_value.py": 1,
    "evaluation.py": 2, "step.py": 5, "validation.py": 3, "counts.py": 2, "remat.py": 2,
    "nn/from_module.py": 1, "nn/dropout.py": 1, "nn/rebuild.py": 2,
    "optim/arithmetic.py": 1, "optim/partition.py": 1, "optim/torch_optim.py": 1,
    "optim/wrappers.py": 1,
    "losses/vocabulary.py": 2, "torch_private.py": 1,
    "compiling/graph.py": 3,
}  # fmt: skip
"""Where new code asks for compilers, transforms or autograd, and how often."""

ASKS = re.compile(
    r"is_dynamo_compiling\(|\b(?:tree\.)?(?:eager|untransformed|differentiated)\(|\btransformed\("
)


def lines_of_code(source: str) -> int:
    """Lines without blanks, comments and docstrings."""
    docs: set[int] = set()
    code: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                assert first.end_lineno is not None
                docs |= {*range(first.lineno, first.end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in QUIET:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - docs)


def files() -> dict[str, str]:
    """The source of each file of the package."""
    paths = sorted(HOME.rglob("*.py"))
    return {path.relative_to(HOME).as_posix(): path.read_text() for path in paths}


def room_of(file: str) -> str:
    """The room that a file belongs to."""
    folder, slash, _ = file.partition("/")
    if slash:
        return folder
    return "others" if file.removesuffix(".py") in OTHERS else "core"


def test_lines_count_what_runs() -> None:
    source = '"""Doc."""\n\n# why\ndef f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert lines_of_code(source) == 4


@pytest.mark.parametrize("file", [*files()])
def test_files_are_short(file: str) -> None:
    assert lines_of_code(files()[file]) <= LONGEST


@pytest.mark.parametrize("file", [*files()])
def test_files_are_narrow(file: str) -> None:
    wide = [
        n for n, line in enumerate(files()[file].splitlines(), 1) if len(line) > 100
    ]
    assert not wide, f"{file} has more than 100 columns in lines {wide}"


def imported(source: str) -> set[str]:
    """The rooms and modules of the package that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "purestep"
        ):
            parts = (node.module or "").split(".")
            names |= (
                {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
            )
    return names


def test_imports_run_downward() -> None:
    for file, source in files().items():
        here = file.split("/")[0].removesuffix(".py")
        if here in ("__init__", "examples", "testing"):
            continue
        top = ast.parse(source)
        top.body = [node for node in top.body if isinstance(node, ast.ImportFrom)]
        for name in imported(ast.unparse(top)) - {here}:
            assert name in ORDER, f"{file} imports {name}, which has no place in ORDER"
            assert ORDER.index(name) < ORDER.index(here), (
                f"{file} imports upward: {name}"
            )


def imports_of(source: str, modules: Collection[str]) -> set[str]:
    """Returns which of the modules a file imports when it is imported itself.

    Imports for type checkers count; those inside functions do not.
    """
    names: set[str] = set()
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules else f"{node.module}")
        stack += ast.iter_child_nodes(node)
    return names & {*modules}


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns modules of which each imports the next, and the last the first; else nothing."""
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in finished:
            return []
        for other in sorted(graph[name]):
            if circle := visit(other, [*path, name]):
                return circle
        finished.add(name)
        return []

    for name in graph:
        if circle := visit(name, []):
            return circle
    return []


def test_a_circle_is_found() -> None:
    graph: dict[str, set[str]] = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert find_circle(graph) == ["b", "c"]
    assert not find_circle(graph | {"c": {"d"}})
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from purestep.x import y"
    assert imports_of(source, ["purestep.x", "z"]) == {"purestep.x"}
    assert imports_of(source, ["purestep.x", "purestep.x.y"]) == {"purestep.x.y"}


def test_imports_have_no_circles() -> None:
    """No module imports itself by way of others, not even for type checkers."""
    names = {}
    for file in files():
        dotted = "purestep." + file.removesuffix(".py").replace("/", ".")
        names[file] = dotted.removesuffix(".__init__")
    graph = {}
    for file, source in files().items():
        if file != "__init__.py":  # It imports all others.
            graph[names[file]] = imports_of(source, {*names.values()} - {"purestep"})
    assert not find_circle(graph)


def test_public_names_are_few() -> None:
    assert len(ps.__all__) <= 50
    assert len(ps.tree.__all__) <= 20


def test_private_names_become_fewer() -> None:
    source = files()["torch_private.py"]
    found = re.findall(
        r'_(?:private|attribute)\(\s*"|from torch\._|getattr\(torch', source
    )
    assert len(found) <= PRIVATE


def test_compilers_and_transforms_are_asked_for_at_the_seams() -> None:
    found = {
        file: len(ASKS.findall(source))
        - len(re.findall(r"def (?:eager|untransformed)", source))
        for file, source in files().items()
        if room_of(file) not in ("testing", "examples")
    }
    beyond = {file: n for file, n in found.items() if n > SEAMS.get(file, 0)}
    assert not beyond, f"asks for compilers or transforms elsewhere: {beyond}"
