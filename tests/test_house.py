"""The house: the size of files, columns, imports that run downward, public and private names."""

import ast
import io
import re
import tokenize
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import purestep as ps

HOME = Path(ps.__file__).parent
QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

OTHERS = {"__init__", "autocast", "random", "remat", "state", "torch_private"}
"""The files at the top that are not the core."""

LONGEST = 400
"""Lines of code of a file."""

ORDER = [
    "types", "torch_private", "autocast", "tree", "stacked", "counts", "hints", "axis", "sharding", "objective",
    "compiling", "validation", "grads", "sync", "optim", "step", "backward", "evaluation", "random",
    "remat", "nn", "data", "losses", "state", "checkpoint", "testing", "examples",
]  # fmt: skip
"""Each imports from those before it alone."""

PRIVATE = 19
"""Private names of torch's."""

SEAMS = {
    "tree/tracing.py": 10, "tree/norms.py": 3, "tree/ops.py": 1, "tree/spec.py": 2,
    "axis/primitives.py": 1, "axis/mesh.py": 1, "axis/process.py": 2, "sharding/gather.py": 1,
    "sync/multi_program.py": 1, "sync/session.py": 1, "sync/replicas.py": 1,
    "grads/accumulate.py": 4, "grads/scan.py": 1, "grads/inplace.py": 1, "grads/functional.py": 3, "grads/grad_and_value.py": 1,
    "backward.py": 1, "evaluation.py": 2, "step.py": 6, "validation.py": 4, "counts.py": 3, "remat.py": 2,
    "nn/from_module.py": 1, "nn/dropout.py": 1, "nn/rebuild.py": 1, "nn/copied_functions.py": 1, "nn/traced_objects.py": 1, "nn/units.py": 1, "nn/tensor_parallel.py": 1,
    "optim/arithmetic.py": 1, "optim/partition.py": 1, "optim/torch_optim.py": 1,
    "optim/wrappers.py": 1,
    "losses/vocabulary.py": 2, "torch_private.py": 1,
    "compiling/graph.py": 3, "compiling/steps.py": 3,
}  # fmt: skip
"""Where new code asks for compilers, transforms or autograd, and how often."""

ASKS = re.compile(
    r"is_dynamo_compiling\(|\b(?:tree\.)?(?:is_plain_eager|can_write|may_be_differentiated)\("
    r"|\bhas_transforms\("
)


def docstring_lines(module: ast.Module) -> set[int]:
    """Returns the lines of docstrings."""
    docs: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                assert first.end_lineno is not None
                docs |= {*range(first.lineno, first.end_lineno + 1)}
    return docs


class Size(NamedTuple):
    """The lines of code of a file, and the tokens on them."""

    lines: int
    tokens: int


@cache
def size(source: str) -> Size:
    """Counts lines without blanks, comments and docstrings, and their tokens.

    An f-string is one token, which tokenize takes apart from Python 3.12 on.
    """
    docs = docstring_lines(ast.parse(source))
    code: set[int] = set()
    tokens = 0
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in QUIET:
            continue
        code |= {*range(token.start[0], token.end[0] + 1)}
        if token.type == getattr(tokenize, "FSTRING_END", None):
            depth -= 1  # It counts, and its start does not.
        elif token.type == getattr(tokenize, "FSTRING_START", None):
            depth += 1
        if depth == 0 and token.start[0] not in docs:
            tokens += 1
    return Size(len(code - docs), tokens)


@cache
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
    assert size(source).lines == 4


@pytest.mark.parametrize("file", [*files()])
def test_files_are_short(file: str) -> None:
    assert size(files()[file]).lines <= LONGEST


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


def test_tests_and_proofs_do_not_import_each_other() -> None:
    """What both use stands in ``support``, which imports neither."""
    allowed = {"tests": {"tests"}, "proofs": {"proofs"}, "support": set[str]()}
    for folder, own_folders in allowed.items():
        others = {"tests", "proofs"} - own_folders
        for file, source in sources(folder).items():
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom):
                    root = (node.module or "").partition(".")[0]
                    assert root not in others, f"{file} imports {node.module}"


def test_public_names_are_few() -> None:
    assert len(ps.__all__) <= 52
    assert len(ps.tree.__all__) <= 20


SHAPED = ["purestep", "proofs", "support", "tests"]
"""Folders whose shape is held. ``TOKENS`` says how dense their code may be."""

TOKENS = {"purestep": 8.0, "proofs": 9.5, "support": 9.5, "tests": 9.5}
"""Tokens for each line of code, in each folder inside the package, and in the others as a whole.

optree, torchtitan, equinox, posteriors, optax and einops have 5.5 to 7.8.
"""

STATEMENTS = 40
"""Statements of a function, with those of functions inside it."""

PARAMETERS = 6
"""Parameters of a private function."""

RIDDLES = {
    "own", "given", "made", "known", "found", "kind", "place", "each", "whole", "piece", "beside",
    "apart", "over", "at", "how", "thing", "taken", "held", "kept", "carried", "asked", "left",
    "said",
}  # fmt: skip
"""Names that could stand for anything, so nothing has them."""

BY_PROFILE = {"map", "filter", "attrgetter", "itemgetter", "repeat", "starmap"}
"""Calls that a comment explains: comprehensions read better, where no profile asks for these."""

PUBLIC_TWICE = {"split", "all_gather"}
"""Names that two modules give to different functions, as ``jax.random.split`` and others do."""


@cache
def sources(folder: str) -> dict[str, str]:
    """Returns the source of each file of a folder of the repository, by its path."""
    root = HOME.parent
    paths = sorted((root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def density(texts: Collection[str]) -> float:
    """Returns the tokens for each line of code."""
    sizes = [size(text) for text in texts]
    return sum(each.tokens for each in sizes) / sum(each.lines for each in sizes)


def names_of_the_package(source: str) -> set[str]:
    """Returns the names that a file defines at its top, or imports from the package."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pure"):
            names |= {alias.name for alias in node.names}
    return names


def find_golf(source: str) -> list[str]:
    """Describes what a reader has to unfold, with its line."""
    lines = source.split("\n")
    tricks = BY_PROFILE - names_of_the_package(source)
    problems = []
    for node in ast.walk(ast.parse(source)):
        number = getattr(node, "lineno", 0)
        if isinstance(node, ast.IfExp):
            inner = [child for child in ast.walk(node) if isinstance(child, ast.IfExp)]
            if len(inner) > 1:
                problems.append(f"{number}: nested conditional expressions")
        elif isinstance(node, ast.Assign):
            is_pair = isinstance(node.targets[0], ast.Tuple)
            if is_pair and isinstance(node.value, ast.Tuple):
                problems.append(f"{number}: a tuple assigned to a tuple")
        elif isinstance(node, ast.FunctionDef):
            num_statements = sum(isinstance(x, ast.stmt) for x in ast.walk(node)) - 1
            if num_statements > STATEMENTS:
                problems.append(f"{number}: {node.name}: {num_statements} statements")
            names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            is_private = node.name.startswith("_") and not node.name.startswith("__")
            if is_private and len(names) > PARAMETERS:
                problems.append(f"{number}: {node.name}: {len(names)} parameters")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            before = lines[max(0, number - 4) : node.end_lineno]
            if node.func.id in tricks and "#" not in "".join(before):
                problems.append(f"{number}: {node.func.id} without a reason")
    return problems


def find_riddles(source: str) -> list[str]:
    """Describes names that could stand for anything, with their lines."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in RIDDLES:
            problems.append(f"{getattr(node, 'lineno', 0)}: {name}")
    return problems


GOLF = """
x = 1 if a else 2 if b else 3
c, d = x, x
def _f(a, b, c, d, e, f, g): pass
e = [*map(str, c)]
def own(place):
    left = place
"""


def test_golf_and_riddles_are_found() -> None:
    problems = [problem.partition(": ")[2] for problem in find_golf(GOLF)]
    assert sorted(problems) == [
        "_f: 7 parameters",
        "a tuple assigned to a tuple",
        "map without a reason",
        "nested conditional expressions",
    ]
    body = "\n".join(["    x = 1"] * (STATEMENTS + 1))
    assert find_golf(f"def f():\n{body}") == ["1: f: 41 statements"]
    assert not find_golf("# The profile asks for it.\ny = [*map(str, x)]")
    assert find_riddles(GOLF) == ["6: own", "6: place", "7: left"]
    assert size('x = f"{a + f(b)} and {c}" + d').tokens == 5
    assert density(["a = [b, c]\n", '"""Doc."""\nx = (\n    1\n)\n']) == 12 / 4


@pytest.mark.parametrize("folder", SHAPED)
def test_code_is_not_dense(folder: str) -> None:
    rooms: dict[str, list[str]] = {}
    for file, source in sources(folder).items():
        room = file.rpartition("/")[0] if folder == "purestep" else folder
        rooms.setdefault(room, []).append(source)
    dense = {room: density(texts) for room, texts in rooms.items()}
    assert not {room: x for room, x in dense.items() if x > TOKENS[folder]}


@pytest.mark.parametrize("file", [*files()])
def test_nothing_has_to_be_unfolded(file: str) -> None:
    assert not find_golf(files()[file])


@pytest.mark.parametrize("file", [*files()])
def test_docstrings_begin_with_a_verb(file: str) -> None:
    """In the third person, as torch's do: "Returns", "Holds"."""
    for node in ast.walk(ast.parse(files()[file])):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            assert text is None or re.match(r"[A-Z][a-z]+s\b", text), node.name


@pytest.mark.parametrize("file", [*files()])
def test_names_say_what_they_stand_for(file: str) -> None:
    assert not find_riddles(files()[file])


def test_functions_at_the_top_of_files_have_different_names() -> None:
    places: dict[str, list[str]] = {}
    for file, source in files().items():
        if room_of(file) == "examples":
            continue  # Each is a program.
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                places.setdefault(node.name, []).append(file)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice.keys() - PUBLIC_TWICE, twice


def test_private_names_become_fewer() -> None:
    source = files()["torch_private.py"]
    found = re.findall(
        r'_(?:private|attribute)\(\s*"|from torch\._|getattr\(torch', source
    )
    assert len(found) <= PRIVATE


def test_compilers_and_transforms_are_asked_for_at_the_seams() -> None:
    found = {
        file: len(ASKS.findall(source))
        - len(re.findall(r"def (?:is_plain_eager|can_write)", source))
        for file, source in files().items()
        if room_of(file) not in ("testing", "examples")
    }
    beyond = {file: n for file, n in found.items() if n > SEAMS.get(file, 0)}
    assert not beyond, f"asks for compilers or transforms elsewhere: {beyond}"
