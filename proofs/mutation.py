"""Random mutants of the package, and how many of them the tests reject.

    python -m proofs.mutation --sample 300 --seed 1 --json mutants.json

A mutant is the package with one small change: another operator, another constant, a condition turned
around, a call that is dropped, two arguments in each other's place. The tests that run the changed
line are tried until one fails, those that took least time first. ``--record FILE`` runs all tests once
and writes which of them run which lines; it needs the package ``coverage``, and takes twice the time
of ``make test``. Messages of errors, annotations and docstrings are not changed.

A mutant that survives is either told apart by no program (the same results, perhaps more slowly), or
a law is missing.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from coverage import Coverage

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "purestep"
LEFT_OUT = {"examples", "testing"}
MOST, TIME = 60, 240
"""How many tests are tried on a mutant, and for how many seconds."""

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.Pow: "*",
}  # fmt: skip


class Mutant(NamedTuple):
    """A file with one change, and where the change stands."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of one file."""
    source = path.read_text()
    file = path.relative_to(ROOT).as_posix()
    for kind, node, after in _changes(ast.parse(source)):
        before = ast.get_source_segment(source, node)
        if before is None or before == after:
            continue
        start, end = _span(source, node)
        mutated = source[:start] + after + source[end:]
        yield Mutant(file, node.lineno, kind, before, after, mutated)


def _span(source: str, node: Any) -> tuple[int, int]:
    """The characters of a node. Columns count bytes."""
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def _changes(tree: ast.AST) -> Iterator[tuple[str, Any, str]]:
    """Each change of a tree: its kind, the node, and the words in its place."""
    for node in _computing(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield "comparison", node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield "operator", node, f"(({left}) {OPERATORS[type(node.op)]} ({right}))"
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield "and, or", node, f"({word.join(f'({ast.unparse(v)})' for v in node.values)})"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield "constant", node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield "constant", node, repr(node.value + 1)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "dropped call", node, "pass"
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            swapped = ast.Call(node.func, [*node.args[1::-1], *node.args[2:]], node.keywords)
            if not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
                yield "swapped arguments", node, ast.unparse(swapped)


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute: no annotations, types, docstrings or messages."""
    skipped: tuple[Any, ...] = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "bases", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, skipped):
                yield child
                yield from _computing(child)


class Contexts:
    """A plugin of pytest, by which ``coverage`` knows the test that runs a line."""

    def __init__(self, measured: "Coverage") -> None:
        self.measured, self.seconds = measured, Counter[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Lines belong to the test while it runs."""
        self.measured.switch_context(item.nodeid)
        yield
        self.measured.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long it took, in milliseconds."""
        self.seconds[report.nodeid] += int(1000 * report.duration)


def record(file: Path, tests: list[str]) -> None:
    """Writes which tests run which lines, and how long each test takes."""
    from coverage import Coverage

    measured = Coverage(data_file=None, source=[str(PACKAGE)])
    contexts = Contexts(measured)
    measured.start()
    pytest.main(["-q", *tests], plugins=[contexts])
    measured.stop()
    data = measured.get_data()
    lines = {
        Path(each).relative_to(ROOT).as_posix(): data.contexts_by_lineno(each)
        for each in data.measured_files()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"seconds": contexts.seconds, "lines": lines}))


def tests_of(mutant: Mutant, recorded: Any) -> list[str]:
    """The tests that run the changed line, quick ones first, behind the file's own examples.

    Of a line that the import alone runs, those that run any line of the file.
    """
    lines = recorded["lines"].get(mutant.file, {})
    names = {name for name in lines.get(str(mutant.line), []) if name}
    names = names or {name for line in lines.values() for name in line if name}
    return [mutant.file, *sorted(names, key=lambda name: recorded["seconds"].get(name, 0))[:MOST]]


def rejected_by(mutant: Mutant, tests: list[str]) -> str | None:
    """The test that fails, ``"time"`` where they do not end; None where all pass."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tests", "proofs", "pyproject.toml", "README.md", "docs", "benchmarks"):
            if (ROOT / name).exists():
                os.symlink(ROOT / name, Path(folder, name))
        shutil.copytree(PACKAGE, Path(folder, "purestep"))
        Path(folder, mutant.file).write_text(mutant.source)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        surroundings = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(
                command, cwd=folder, env=surroundings, timeout=TIME, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return "time"
    if run.returncode == pytest.ExitCode.OK:
        return None
    if run.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else run.stdout[-200:] + run.stderr[-200:]


def judged(task: tuple[Mutant, Any]) -> tuple[Mutant, str | None]:
    """A mutant, and what rejects it."""
    mutant, recorded = task
    return mutant, rejected_by(mutant, tests_of(mutant, recorded))


def main() -> None:
    """Draws mutants, and tells which of them survive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--record", type=Path, help="run all tests, and write which run which lines"
    )
    parser.add_argument("--tests", nargs="*", default=[], help="what --record runs; nothing: all")
    parser.add_argument("--recorded", type=Path, help="what --record wrote")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files that begin so, such as purestep/axis")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.record:
        record(given.record, given.tests)
        return
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name not in LEFT_OUT]
    every = [mutant for path in files for mutant in mutants_of(path)]
    every = [mutant for mutant in every if mutant.file.startswith(given.only)]
    drawn = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    recorded = json.loads(given.recorded.read_text())
    survivors, done = [], 0
    with multiprocessing.Pool(given.workers) as pool:
        for mutant, test in pool.imap_unordered(judged, [(one, recorded) for one in drawn]):
            done += 1
            words = f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.before} -> {mutant.after}"
            print(
                f"{done:4} {'rejected' if test else 'SURVIVES'} {words}\n       {test}", flush=True
            )
            if test is None:
                survivors.append(words)
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} rejected; of {len(every)} there are")
    print(*survivors, sep="\n")


if __name__ == "__main__":
    main()
