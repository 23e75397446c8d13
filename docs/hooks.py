"""What the site takes from the repository.

Some pages and pictures stand elsewhere in it. Links of these pages to files that the site does not
show become plain text. A line ``::: ps.NAME`` of a reference page is the docstring of that name, and
``::: purestep.MODULE`` those of all names in the module's ``__all__``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = [
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/CONFORMANCE.md",
    "proofs/README.md",
]
PICTURES = ["benchmarks/results", "purestep/examples"]
MEMBERS = {
    "Axis": ["size", "index"],
    "LocalAxis": ["index"],
    "VmapAxis": ["map"],
    "MeshAxis": ["rank"],
    "testing.ThreadAxis": ["map", "split", "rank"],
}
"""Of these classes, the members for users; the rest is for the package."""
NAME = re.compile(r"^::: ps\.(\S+)$", re.M)
MODULE = re.compile(r"^::: purestep\.(\S+)$", re.M)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """The pages stand in ``why``, and each picture beside the page that shows it."""
    for page in PAGES:
        files.append(
            File.generated(config, f"why/{page}", abs_src_path=str(ROOT / page))
        )
    for folder in PICTURES:
        for picture in (ROOT / folder).glob("*.png"):
            place = f"why/{picture.relative_to(ROOT)}"
            files.append(File.generated(config, place, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """The page with names where they are defined, and with links that lead somewhere."""
    if page.file.src_uri.removeprefix("why/") not in PAGES:
        return NAME.sub(entry, MODULE.sub(entries, markdown))
    here = PurePosixPath(page.file.src_uri).parent

    def linked(match: re.Match[str]) -> str:
        known = files.get_file_from_path(str(here / match[2]))
        return match[0] if known else match[1]

    return LINK.sub(linked, markdown)


def entries(match: re.Match[str]) -> str:
    """One entry for each name that a module lists, under the name of the package that shows it."""
    tree = ast.parse(
        (ROOT / "purestep" / f"{match[1].replace('.', '/')}.py").read_text()
    )
    (listed,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return "\n\n".join(
        f"::: ps.{match[1].rpartition('.')[0]}.{name}" for name in listed
    )


def entry(match: re.Match[str]) -> str:
    """What mkdocstrings reads: the place of the definition, with the public name above it."""
    module, _, name = f"purestep.{match[1]}".rpartition(".")
    shown = f"heading: ps.{match[1]}, toc_label: {name}"
    if match[1] in MEMBERS:
        shown += f", members: {MEMBERS[match[1]]}"
    return f"::: {defined(module, name)}\n    options: {{{shown}}}"


def defined(module: str, name: str) -> str:
    """The path of a name's definition: a module may hide a function of the same name."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if name in [each.asname or each.name for each in node.names]:
                return defined(node.module, name)
            if node.names[0].name == "*":
                return defined(node.module, name)
    return f"{module}.{name}"
