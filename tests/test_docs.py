"""Tests README.md and docs/: programs run, names, links and claims hold, sentences are short."""

import ast
import builtins
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import purestep as ps
from purestep.torch_private import NEWEST, OLDEST
from support.programs import run_program

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "pages"
PAGES = [
    ROOT / "README.md",
    ROOT / "purestep" / "testing" / "README.md",
    *DOCS.rglob("*.md"),
]
OTHERS = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *(ROOT / "proofs").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
]
CODE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
FENCED = re.compile(r"^(`{3,}).*?^\1`*$", re.S | re.M)
OUTPUT = re.compile(r"^```text\n(.*?)^```", re.S | re.M)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMESPACES = {
    "": ps,
    "optim.": ps.optim,
    "losses.": ps.losses,
    "random.": ps.random,
    "checkpoint.": ps.checkpoint,
    "tree.": ps.tree,
    "testing.": ps.testing,
}
FOREIGN = r"what is given|of its own|nobody|whoever|is told|its own business"


def name_page(page: Path) -> str:
    """Names a page by its path in the repository."""
    return page.relative_to(ROOT).as_posix()


PROGRAMS = [page for page in PAGES if CODE.search(page.read_text())]
assert len(PROGRAMS) > 20


@pytest.mark.parametrize("page", PROGRAMS, ids=name_page)
def test_the_programs_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs them from top to bottom, in an empty folder, and compares what they print."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text()
    # The compiler looks for globals in the module of this name.
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for match in CODE.finditer(text):
        # Empty lines before the code, so that an error names the page's line.
        number = text[: match.start()].count("\n") + 1
        code = "\n" * number + match[1]
        if "import jax" in code:  # A process that has imported JAX warns when it forks.
            alone = "import purestep as ps\nimport torch\n" + code
            run = run_program(["-c", alone], tmp_path)
            assert run.returncode == 0, run.stderr
        else:
            exec(compile(code, name_page(page), "exec"), vars(module))
    printed = capsys.readouterr().out
    for output in OUTPUT.findall(text):
        assert output in printed


def test_every_public_name_is_on_a_reference_page() -> None:
    documented: list[str] = []
    for page in (DOCS / "reference").glob("*.md"):
        documented += re.findall(r"^::: ps\.(\S+)$", page.read_text(), re.M)
    public: set[str] = set()
    for prefix, namespace in NAMESPACES.items():
        names = getattr(namespace, "__all__", None) or dir(namespace)
        public.update(prefix + name for name in names)
    namespaces = {prefix.removesuffix(".") for prefix in NAMESPACES}
    assert sorted(documented) == sorted(public - namespaces)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs/mkdocs.yml").read_text()
    listed = re.findall(r": ((?!why/(?:bench|proofs|CH))\S+\.md)$", navigation, re.M)
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def find_anchors(page: Path) -> set[str]:
    """Finds the anchors that the site gives to the headings of a page."""
    anchors = set()
    for heading in re.findall(r"^#+ (.*)", page.read_text(), re.M):
        words = re.sub(r"[^\w\s-]", "", heading)
        anchors.add(re.sub(r"[\s-]+", "-", words.strip().lower()))
    return anchors


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_page)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """On the site, files that the repository has elsewhere are in ``why``."""
    text = FENCED.sub("", page.read_text())
    for link, anchor in LINK.findall(text):
        file = (page.parent / link).resolve() if link else page
        if DOCS / "why" in file.parents and not file.exists():
            file = ROOT / file.relative_to(DOCS / "why")
        assert file.exists(), f"{name_page(page)}: {link}"
        if anchor:
            assert anchor in find_anchors(file), f"{name_page(page)}: {link}#{anchor}"


def test_the_errors_on_the_page_of_troubles_exist() -> None:
    """Looks for each text of its table among the strings of the package."""
    page = (DOCS / "howto" / "troubles.md").read_text()
    _, _, errors = page.partition("## Errors")
    texts: list[str] = []
    for row in re.findall(r"^\| (`[^|]*) \|", errors, re.M):
        texts += re.findall(r"`([^`]+)`", row)
    assert len(texts) > 10
    strings: list[str] = []
    for file in (ROOT / "purestep").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    source = "\n".join(strings)
    assert not [text for text in texts if text not in source]


def split_sentences(text: str) -> list[str]:
    """Splits a page into sentences, without code, tables and pictures."""
    text = FENCED.sub("", text)
    text = re.sub(r"^(?:    |\||!\[|:::|#|\?\?\?|!!!).*$", "\n", text, flags=re.M)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.M)
    sentences: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        sentences += re.split(r"(?<=[.:?!;])\s+", line)
    return sentences


def find_long_sentences(text: str) -> list[str]:
    """Finds sentences of more than twenty-five words."""
    long = []
    for sentence in split_sentences(text):
        words = re.findall(r"\w\S*", sentence)
        if len(words) > 25:
            long.append(sentence)
    return long


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_page)
def test_sentences_are_short_and_plain(page: Path) -> None:
    """CONTRIBUTING.md has the rules; a few sentences of up to twenty-five words remain."""
    text = page.read_text()
    assert not find_long_sentences(text)
    if page.name != "CONTRIBUTING.md":
        assert not re.findall(FOREIGN, text)


@pytest.mark.parametrize(
    "module", sorted((ROOT / "purestep").rglob("*.py")), ids=name_page
)
def test_docstrings_are_short_and_plain(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            text = re.sub(r"^ *(>>>|\.\.\.).*$", "\n", docstring, flags=re.M)
            assert not find_long_sentences(text)
            assert not re.findall(FOREIGN, text)


def test_the_readme_is_one_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 180
    assert len(text.split()) <= 900


CLAIMS = {
    "pyproject.toml": f'"torch>={OLDEST}"',
    "README.md": f"torch {OLDEST} to {NEWEST}",
    "docs/pages/start/install.md": f"torch {OLDEST} to {NEWEST}",
    "CHANGELOG.md": f"## {ps.__version__}",
    "CITATION.cff": f"version: {ps.__version__}\n",
}


@pytest.mark.parametrize("page", CLAIMS)
def test_versions_are_claimed_alike_everywhere(page: str) -> None:
    assert CLAIMS[page] in (ROOT / page).read_text()


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    """A row in the wrong table would be read as a figure."""
    for file in ROOT.rglob("*.md"):
        path = file.relative_to(ROOT)
        if path.parts[0] == "build" or any(part.startswith(".") for part in path.parts):
            continue
        for table in re.findall(r"(?:^\|.*\n)+", file.read_text(), re.M):
            rows = table.splitlines()
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            assert len(cells) == 1, f"{path}: {table}"


def test_the_training_program_runs_on_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes log the losses of one rank, by the program and the commands of the pages."""
    program = CODE.findall((DOCS / "start" / "loop.md").read_text())[-1]
    (tmp_path / "train.py").write_text(program)
    one_rank = tmp_path / "one"
    two_nodes = tmp_path / "two"
    one_rank.mkdir()
    two_nodes.mkdir()
    page = (DOCS / "howto" / "nodes.md").read_text()
    commands = re.findall(r"^    (torchrun .* train\.py)(?: &)?$", page, re.M)
    assert len(commands) == 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _, port = free.getsockname()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    nodes = []
    for command in commands:
        words = command.replace("29500", str(port)).replace("train.py", "../train.py")
        torchrun = [sys.executable, "-m", "torch.distributed.run", *words.split()[1:]]
        nodes.append(subprocess.Popen(torchrun, cwd=two_nodes, env=env))
    try:
        assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    monkeypatch.chdir(one_rank)
    monkeypatch.delattr(builtins, "_", raising=False)  # a doctest's last value
    exec(program, {"__name__": "__main__"})

    losses = read_losses(one_rank)
    assert len(losses) == 20
    # A wrong share of the data would be off by 1e-2.
    torch.testing.assert_close(losses, read_losses(two_nodes), rtol=1e-4, atol=0)


def test_the_training_program_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes the same steps, without a warning, by a compiler that runs the graph as it is."""
    program = CODE.findall((DOCS / "start" / "loop.md").read_text())[-1]
    setting = "COMPILE = False"
    assert setting in program
    backend = (
        'COMPILE = __import__("functools").partial(torch.compile, backend="eager")'
    )
    monkeypatch.delattr(builtins, "_", raising=False)  # a doctest's last value
    for name in ("eager", "compiled"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        # The compiler looks for globals in the module of this name.
        module = ModuleType(f"program_{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(program, vars(module))
        program = program.replace(setting, backend)
    torch.testing.assert_close(
        read_losses(tmp_path / "compiled"),
        read_losses(tmp_path / "eager"),
        rtol=1e-4,
        atol=0,
    )


def read_losses(folder: Path) -> torch.Tensor:
    """Reads the losses that the program logged in this folder."""
    log = (folder / "log.jsonl").read_text()
    losses = [json.loads(line)["loss"] for line in log.splitlines()]
    return torch.tensor(losses)
