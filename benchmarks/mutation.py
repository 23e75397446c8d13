"""How many random mutants of the package do the tests reject?

    python -m benchmarks.mutation --record build/lines.json
    python -m benchmarks.mutation --recorded build/lines.json --sample 300 --seed 1 --table build/mutants.md

A mutant is the package with one small change: another operator, another constant, a condition turned
around, a call that is dropped, two arguments in each other's place. The tests that run the changed
statement are tried until one fails, for ``--patience`` seconds by the clock of the recording: for half of
them the quickest, then those of the proofs. A mutant that takes three times as long is rejected; what it has started
ends with it. ``--record`` runs all tests once and writes which of them run which lines; it needs the
package ``coverage``, and takes twice the time of ``make test``. Messages of errors, annotations and
docstrings are not changed, nor is ``zip(strict=True)``, which only a mistake of the package itself meets.
Tests that read the package's source instead of running it reject nothing.

A mutant that survives is either told apart by no program (the same results, perhaps more slowly), or
a law is missing. ``--table`` writes a line for each, whose last column is for the reason. What begins
with "equivalent" there does not count, in later runs, too, which keep the reasons.
"""

import argparse
import ast
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pytest
import torch

if TYPE_CHECKING:
    from coverage import Coverage

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "purestep"
LEFT_OUT = {"examples", "testing"}
READING = ("proofs/test_mutants.py", "tests/test_house.py", "tests/test_package.py")
"""Tests of the package's source."""
RANKS = (
    "purestep/axis", "purestep/checkpoint", "purestep/sharding", "purestep/sync",
    "purestep/grads/per_microbatch", "purestep/nn/tensor_parallel", "purestep/nn/units",
    "purestep/validation",
)  # fmt: skip
"""What other processes run above all, unseen by the recording."""
IMPORTED = (
    "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.tensor",
    "torch.testing", "safetensors.torch", "transformers", "hypothesis.strategies",
)  # fmt: skip
"""What is imported once, for all mutants."""
QUIETLY = [
    "-qpno:cacheprovider",
    "--assert=plain",
    "-Wignore::pytest.PytestAssertRewriteWarning",
]
FIRST = 10
"""How many tests come first."""

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.Pow: "*",
}  # fmt: skip
SYMMETRIC = {"max", "min", "maximum", "minimum", "equal", "promote_types"}
"""Functions whose first two arguments may change places."""


class Mutant(NamedTuple):
    """A file with one change, and the lines of the statement in which it stands."""

    file: str
    lines: range
    kind: str
    before: str
    after: str
    source: str

    @property
    def words(self) -> str:
        """The change and its first line, as cells of a table, wherever it stands now."""
        where = (ROOT / self.file).read_text().splitlines()[self.lines[0] - 1]
        change = " ".join(f"{self.before} -> {self.after} in {where}".split())
        return f"{self.file} | {self.kind}: `{change}`"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of one file that are other programs."""
    source = path.read_text()
    file, program = path.relative_to(ROOT).as_posix(), ast.parse(source)
    for kind, node, after, lines in _changes(program):
        start, end = _span(source, node)
        mutated = source[:start] + after + source[end:]
        if ast.dump(ast.parse(mutated)) != ast.dump(program):
            yield Mutant(file, lines, kind, source[start:end], after, mutated)


def _span(source: str, node: Any) -> tuple[int, int]:
    """The characters of a node. Columns count bytes."""
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(
            lines[line - 1].encode()[:column].decode()
        )

    return offset(node.lineno, node.col_offset), offset(
        node.end_lineno, node.end_col_offset
    )


def _changes(tree: ast.AST) -> Iterator[tuple[str, Any, str, range]]:
    """Each change of a tree: its kind, the node, the words in its place, and the statement's lines."""
    for node, lines in _computing(tree, range(0)):
        for kind, changed, after in _changes_of(node):
            yield kind, changed, after, lines


def _changes_of(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield "comparison", node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        yield "operator", node, f"(({left}) {OPERATORS[type(node.op)]} ({right}))"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield (
            "and, or",
            node,
            f"({word.join(f'({ast.unparse(v)})' for v in node.values)})",
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", node, repr(node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", node, "pass"
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        swapped = ast.Call(
            node.func, [*node.args[1::-1], *node.args[2:]], node.keywords
        )
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in SYMMETRIC and not any(
            isinstance(arg, ast.Starred) for arg in node.args[:2]
        ):
            yield "swapped arguments", node, ast.unparse(swapped)


def _computing(node: ast.AST, lines: range) -> Iterator[tuple[ast.AST, range]]:
    """The nodes that compute, and their statements' lines: no annotations, types, docstrings or messages."""
    skipped: tuple[Any, ...] = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "bases", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            if isinstance(child, ast.AST) and not isinstance(child, skipped):
                inside = _lines(child) if isinstance(child, ast.stmt) else lines
                yield child, inside
                yield from _computing(child, inside)


def _lines(statement: Any) -> range:
    """The lines of a statement, without those that stand indented below it; all of a function's."""
    below = (
        None
        if isinstance(statement, ast.FunctionDef)
        else getattr(statement, "body", None)
    )
    end = below[0].lineno if below else statement.end_lineno + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


class Contexts:
    """A plugin of pytest, by which ``coverage`` knows the test that runs a line."""

    def __init__(self, measured: "Coverage") -> None:
        self.measured, self.times, self.current = measured, Counter[str](), ""
        self.elsewhere, self.failed = set[str](), set[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Lines belong to the test while it runs."""
        self.current = item.nodeid
        self.measured.switch_context(item.nodeid)
        yield
        self.measured.switch_context("")
        self.current = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long it took, in milliseconds."""
        self.times[report.nodeid] += int(1000 * report.duration)
        if report.failed:
            self.failed.add(report.nodeid)

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which runs lines unseen: in other processes, or traced by a compiler."""

        @wraps(function)
        def noted(*args: Any, **how: Any) -> Any:
            self.elsewhere.add(self.current)
            return function(*args, **how)

        return noted


def record(file: Path, tests: list[str]) -> None:
    """Writes which tests run which lines, or lines unseen, and how long each test takes."""
    from coverage import Coverage

    measured = Coverage(data_file=None, source=[str(PACKAGE)])
    contexts = Contexts(measured)
    measured.start()
    from purestep.testing.processes import World

    for owner, name in ((World, "run"), (subprocess, "run"), (torch, "compile")):
        setattr(owner, name, contexts.noting(getattr(owner, name)))
    pytest.main([*QUIETLY, *tests], plugins=[contexts])
    measured.stop()
    data = measured.get_data()
    # Without those that fail as it is, or read what others run.
    kept = {
        test
        for test in {*contexts.times} - contexts.failed
        if not test.startswith(READING)
    }
    names = sorted(kept)
    number = {name: at for at, name in enumerate(names)}
    lines = {
        Path(each).relative_to(ROOT).as_posix(): {
            line: [number[name] for name in found if name in number]
            for line, found in data.contexts_by_lineno(each).items()
        }
        for each in data.measured_files()
    }
    elsewhere = [number[name] for name in contexts.elsewhere if name in number]
    times = [contexts.times[name] for name in names]
    written = {"names": names, "times": times, "elsewhere": elsewhere, "lines": lines}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(written))


def tests_of(mutant: Mutant, recorded: Any, patience: float) -> list[str]:
    """The tests that run the changed statement, behind the file's own examples.

    Of one that no test is seen to run, those that run lines of the file and lines unseen.
    """
    lines, times = recorded["lines"].get(mutant.file, {}), recorded["times"]
    found = {at for line in mutant.lines for at in lines.get(str(line), [])}
    of_file, unseen = (
        {at for each in lines.values() for at in each},
        {*recorded["elsewhere"]},
    )
    if not found:
        found = of_file & unseen or of_file | unseen
    if mutant.file.startswith(RANKS):
        found |= unseen
    names, spent, chosen = recorded["names"], 0, [mutant.file]
    quick = sorted(found, key=times.__getitem__)
    ends = itertools.accumulate(times[at] for at in quick)
    half = sum(end <= 500 * patience for end in ends)
    proofs_first = sorted(
        quick[half:], key=lambda at: not names[at].startswith("proofs")
    )
    for at in quick[:half] + proofs_first:
        spent += times[at]
        if spent <= 1000 * patience or len(chosen) == 1:
            chosen.append(names[at])
    return chosen


def rejected_by(mutant: Mutant, tests: list[str], patience: float) -> str | None:
    """The test that fails, or "time" where they do not end; None where all pass, or none runs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in (
            "tests",
            "proofs",
            "support",
            "pyproject.toml",
            "README.md",
            "docs",
            "benchmarks",
        ):
            if (ROOT / name).exists():
                os.symlink(ROOT / name, Path(folder, name))
        shutil.copytree(PACKAGE, Path(folder, "purestep"))
        Path(folder, mutant.file).write_text(mutant.source)
        # Most of what is wrong shows in few tests, and those of others take seconds to import.
        parts = tests[:1], tests[1 : 1 + FIRST], tests[1 + FIRST :]
        results = (_failure(Path(folder), part, patience) for part in parts if part)
        return next(filter(None, results), None)


def _failure(folder: Path, tests: list[str], patience: float) -> str | None:
    log, child = folder / "log", os.fork()
    if not child:
        _run(folder, log, tests)
    ended, end = 0, time.monotonic() + 3 * max(patience, 60)
    while not ended and time.monotonic() < end:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # Ranks and all that they have started.
    if not ended:
        os.waitpid(child, 0)
        return "time"
    said, code = log.read_text(errors="replace"), os.waitstatus_to_exitcode(status)
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    if code == pytest.ExitCode.USAGE_ERROR and "conftest" not in said:
        raise RuntimeError(f"record again: {tests}\n{said}")
    failed = [
        line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return failed[0] if failed else said[-300:] or f"ended with {code}"


def _run(folder: Path, log: Path, tests: list[str]) -> NoReturn:
    """Runs tests of the folder in this process, which is a copy with torch imported, and ends it."""
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for place in (1, 2):
        os.dup2(output, place)
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        code = pytest.main(["-x", *QUIETLY, *tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reasons_in(table: Path | None) -> dict[str, str]:
    """The reasons of an earlier table, by the words of the mutants."""
    rows = table.read_text().splitlines()[2:] if table and table.exists() else []
    split = [row.strip("| ").rsplit(" | ", 1) for row in rows if row.startswith("| ")]
    return {
        words: reason.strip()
        for words, reason in (pair for pair in split if len(pair) == 2)
    }


def main() -> None:
    """Draws mutants, and tells which of them survive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--record", type=Path, help="run tests, and write which run which lines"
    )
    parser.add_argument(
        "--tests", nargs="*", default=[], help="what --record runs; nothing: all"
    )
    parser.add_argument("--recorded", type=Path, help="what --record wrote")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="files that begin so, such as purestep/axis"
    )
    parser.add_argument(
        "--kinds", nargs="*", default=[], help="as 'comparison'; nothing: all"
    )
    parser.add_argument(
        "--tried", type=Path, help="those in this file are not drawn; then added"
    )
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds of tests for each"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--table", type=Path, help="where survivors are listed, with reasons"
    )
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    if given.record:
        record(given.record, given.tests)
        return
    files = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name not in LEFT_OUT
    ]
    every = [mutant for path in files for mutant in mutants_of(path)]
    every = [mutant for mutant in every if mutant.file.startswith(given.only)]
    every = [
        mutant for mutant in every if not given.kinds or mutant.kind in given.kinds
    ]
    tried = given.tried.read_text() if given.tried and given.tried.exists() else ""
    known = {*tried.splitlines()}
    every = [mutant for mutant in every if mutant.words not in known]
    drawn = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    recorded, reasons = json.loads(given.recorded.read_text()), reasons_in(given.table)
    survivors, patience = [], given.patience
    forks = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(given.workers, forks) as pool:
        runs = {
            pool.submit(
                rejected_by, one, tests_of(one, recorded, patience), patience
            ): one
            for one in drawn
        }
        for done, run in enumerate(as_completed(runs), 1):
            mutant, test = runs[run], run.result()
            verdict = "rejected" if test else "SURVIVES"
            print(f"{done:4} {verdict} {mutant.words}\n       {test}", flush=True)
            if given.tried:
                with given.tried.open("a") as file:
                    print(mutant.words, file=file)
            if test is None:
                survivors.append(mutant.words)
    reasons = {**reasons, **{words: reasons.get(words, "") for words in survivors}}
    equal = sum(reasons[words].startswith("equivalent") for words in survivors)
    other, rejected = len(drawn) - equal, len(drawn) - len(survivors)
    print(
        f"{rejected} of {other} rejected, {100 * rejected / max(1, other):.1f} %; {equal} equivalent"
    )
    if given.table:
        rows = [f"| {words} | {reasons[words]} |" for words in sorted(reasons)]
        given.table.write_text(
            "\n".join(["| file | change | why |", "|---|---|---|", *rows, ""])
        )
    print(*survivors, sep="\n")


if __name__ == "__main__":
    main()
