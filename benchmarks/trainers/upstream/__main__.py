"""Runs the program of each page, and compares what it prints with what the page says."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
FOLDERS = {
    "AXOLOTL": "axolotl",
    "LLAMA_FACTORY": "llamafactory",
    "OLMO_CORE": "olmo",
    "TORCHOPT": "",
    "TUNIX": "tunix",
}
"""Where each page's packages are, below ``build``."""
EMPTY = """from benchmarks.trainers.absent import find_empty
from benchmarks.trainers.with_axolotl import ABSENT
find_empty(*ABSENT, "torchaudio")
"""
"""Before a program of transformers': packages that are imported and not used are not installed here."""


def blocks(page: str) -> tuple[str, str]:
    """The program, and what it prints."""
    text = (HERE / f"{page}.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.S)
    printed = re.findall(r"```text\n(.*?)```", text, re.S)
    return programs[0], printed[0]


def run(page: str) -> str:
    """Returns the lines that a program prints, without progress bars and dictionaries of metrics."""
    program, _ = blocks(page)
    paths = [
        str(ROOT),
        *([str(ROOT / "build" / FOLDERS[page])] if FOLDERS[page] else []),
    ]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text((EMPTY if "transformers" in program else "") + program)
        done = subprocess.run(
            [sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    lines = [
        line for line in done.stdout.splitlines() if not line.startswith(("{", "\r"))
    ]
    return "\n".join(lines) + "\n" if not done.returncode else done.stderr[-2000:]


def main() -> None:
    """Says of each page whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", default=[*FOLDERS])
    wrong = []
    for page in parser.parse_args().pages:
        printed, (_, said) = run(page), blocks(page)
        print(
            f"{page}: {'as it says' if printed == said else 'NOT as it says'}\n{printed}"
        )
        wrong += [page] * (printed != said)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
