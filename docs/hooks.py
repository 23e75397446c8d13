"""Pages and pictures of the repository that the site shows where they are.

Links to files that the site does not show become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ["CHANGELOG.md", "benchmarks/README.md", "benchmarks/CONFORMANCE.md", "proofs/README.md"]
PICTURES = ["benchmarks/results", "purestep/examples"]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """The pages stand in ``why``, and each picture beside the page that shows it."""
    for page in PAGES:
        files.append(File.generated(config, f"why/{page}", abs_src_path=str(ROOT / page)))
    for folder in PICTURES:
        for picture in (ROOT / folder).glob("*.png"):
            place = f"why/{picture.relative_to(ROOT)}"
            files.append(File.generated(config, place, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Links of the repository's pages to its files, as text."""
    if page.file.src_uri.removeprefix("why/") not in PAGES:
        return markdown
    here = PurePosixPath(page.file.src_uri).parent

    def linked(match: re.Match[str]) -> str:
        known = files.get_file_from_path(str(here / match[2]))
        return match[0] if known else match[1]

    return LINK.sub(linked, markdown)
