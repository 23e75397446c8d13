"""The house: the size of files, columns, imports that run downward, public and private names."""

import ast
import io
import re
import tokenize
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
    "types", "torch_private", "tree", "weights", "hints", "axis", "objective", "compiling", "checks",
    "reverse", "grad_and_value", "modes", "sharding", "accumulate", "optim", "step", "evaluation",
    "random", "modules", "data", "remat", "losses", "state", "checkpoint", "testing", "examples",
]  # fmt: skip
"""Each imports from those before it alone."""

PRIVATE = 17
"""Private names of torch's."""

SEAMS = {
    "tree/leaves.py": 13, "tree/alike.py": 1, "tree/structure.py": 3,
    "axis/laws.py": 1, "axis/mesh.py": 1, "axis/ranks.py": 4, "axis/session.py": 1, "axis/whole.py": 1,
    "accumulate.py": 4, "modes.py": 2, "evaluation.py": 2, "grad_and_value.py": 1, "step.py": 5,
    "checks.py": 3, "weights.py": 2, "remat.py": 2,
    "modules/apply.py": 1, "modules/keyed.py": 1, "modules/plan.py": 2,
    "optim/arithmetic.py": 1, "optim/partition.py": 2, "optim/torch_optim.py": 1,
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
