"""README.md and docs/: their programs run, their names, links and claims hold, their sentences are short."""

import ast
import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import purestep as ps
from purestep.torch_private import NEWEST, OLDEST

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "pages"
PAGES = [
    ROOT / "README.md",
    ROOT / "purestep" / "testing" / "README.md",
    *DOCS.rglob("*.md"),
]
OTHERS = [ROOT / f"{each}.md" for each in ("CONTRIBUTING", "CHANGELOG", "SECURITY")]
OTHERS += [*(ROOT / "proofs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
CODE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
FENCED = re.compile(r"^(`{3,}).*?^\1`*$", re.S | re.M)
OUTPUT = re.compile(r"^```text\n(.*?)^```", re.S | re.M)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMESPACES = {"": ps, "optim.": ps.optim, "losses.": ps.losses, "random.": ps.random}
NAMESPACES |= {"checkpoint.": ps.checkpoint, "tree.": ps.tree, "testing.": ps.testing}
FOREIGN = r"what is given|of its own|nobody|whoever|is told|its own business"


def name(page: Path) -> str:
    """The page as a test's name shows it."""
    return page.relative_to(ROOT).as_posix()


PROGRAMS = [page for page in PAGES if CODE.search(page.read_text())]
assert len(PROGRAMS) > 20


@pytest.mark.parametrize("page", PROGRAMS, ids=name)
def test_the_programs_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From top to bottom, in an empty folder; they print what the page says that they print."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "page"}
    for code in CODE.finditer(text):
        lines = "\n" * (
            text[: code.start()].count("\n") + 1
        )  # an error names the page's line
        exec(compile(lines + code[1], name(page), "exec"), names)
    printed = capsys.readouterr().out
    for output in OUTPUT.findall(text):
        assert output in printed


def test_every_public_name_is_on_a_reference_page() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: ps\.(\S+)$", text, re.M)
    public: set[str] = set()
    for prefix, namespace in NAMESPACES.items():
        public |= {
            prefix + each
            for each in getattr(namespace, "__all__", None) or dir(namespace)
        }
    assert sorted(shown) == sorted(public - {prefix[:-1] for prefix in NAMESPACES})


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs/mkdocs.yml").read_text()
    listed = re.findall(r": ((?!why/(?:bench|proofs|CH))\S+\.md)$", navigation, re.M)
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def anchors(page: Path) -> set[str]:
    """What the site calls the headings of a page."""
    heads = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower())
        for head in heads
    }


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """In the site, what the repository has elsewhere stands in ``why``."""
    for link, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        file = (page.parent / link).resolve() if link else page
        if DOCS / "why" in file.parents and not file.exists():
            file = ROOT / file.relative_to(DOCS / "why")
        assert file.exists(), f"{name(page)}: {link}"
        assert not anchor or anchor in anchors(file), f"{name(page)}: {link}#{anchor}"


def sentences(text: str) -> list[str]:
    """Of a page without code, tables and pictures."""
    text = FENCED.sub("", text)
    text = re.sub(r"^(?:    |\||!\[|:::|#|\?\?\?|!!!).*$", "\n", text, flags=re.M)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.M)
    paragraphs = re.split(r"\n\s*\n", text)
    return [
        s
        for p in paragraphs
        for s in re.split(r"(?<=[.:?!;])\s+", " ".join(p.split()))
        if s
    ]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name)
def test_sentences_are_short_and_plain(page: Path) -> None:
    """CONTRIBUTING.md has the rules; a few sentences of up to twenty-five words remain."""
    names_them = page.name == "CONTRIBUTING.md"
    assert_short_and_plain(page.read_text(), plain=not names_them)


def assert_short_and_plain(text: str, *, plain: bool = True) -> None:
    assert not [
        each for each in sentences(text) if len(re.findall(r"\w\S*", each)) > 25
    ]
    assert not (plain and re.findall(FOREIGN, text))


@pytest.mark.parametrize("module", sorted((ROOT / "purestep").rglob("*.py")), ids=name)
def test_docstrings_are_short_and_plain(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = re.sub(
                r"^ *(>>>|\.\.\.).*$", "\n", ast.get_docstring(node) or "", flags=re.M
            )
            assert_short_and_plain(text)


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
    """A row that came into a table that is not its own would be read as a figure."""
    for file in ROOT.rglob("*.md"):
        if any(part.startswith(".") for part in file.relative_to(ROOT).parts):
            continue
        for rows in re.findall(r"(?:^\|.*\n)+", file.read_text(), re.M):
            cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows.splitlines()]
            assert len(set(cells)) == 1, f"{file.relative_to(ROOT)}: {rows}"


def test_the_training_program_runs_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole program of the first page: two ranks log the losses of one."""
    program = CODE.findall((DOCS / "start" / "loop.md").read_text())[-1]
    (tmp_path / "train.py").write_text(program)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
    ]
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*run, "../train.py"], cwd=two, env=where, check=True, timeout=240)
    monkeypatch.chdir(one)
    monkeypatch.delattr(builtins, "_", raising=False)  # a doctest's last value
    exec(program, {"__name__": "__main__"})
    logs = [(folder / "log.jsonl").read_text().splitlines() for folder in (one, two)]
    losses = [torch.tensor([json.loads(line)["loss"] for line in log]) for log in logs]
    assert len(losses[0]) == 20
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)  # a wrong share: 1e-2
