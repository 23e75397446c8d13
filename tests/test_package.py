"""The package as a whole: its import, its names, how it installs."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

import purestep as ps

ROOT = Path(__file__).parent.parent


def python(*args: Any, cwd: Path = ROOT, interpreter: Any = sys.executable) -> str:
    """What a program prints that must end well."""
    run = subprocess.run(
        [interpreter, *args], capture_output=True, text=True, timeout=240, cwd=cwd
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "-W" not in args or run.stderr == ""
    return run.stdout


IMPORT = """
import sys, random
import torch, optree
before = (torch.get_rng_state().sum(), torch.is_grad_enabled(), torch.get_default_dtype(),
          torch.get_num_threads(), random.getstate(), set(sys.modules))
import purestep
after = (torch.get_rng_state().sum(), torch.is_grad_enabled(), torch.get_default_dtype(),
         torch.get_num_threads(), random.getstate())
assert before[:-1] == after, "importing purestep changed global state"
new = set(sys.modules) - before[-1]
# What takes a second to import (compilers, most of torch.distributed) is in none of these.
assert {name.split(".")[0] for name in new} == {"purestep", "einops", "safetensors"}, new
late = {"purestep.compiling.cpu", "purestep.axis.allow_in_graph"}
assert not late & new, late & new
"""


def test_import_is_light_and_silent() -> None:
    """Nothing is loaded beyond torch, optree, einops, safetensors and the package, and nothing else of these than they load alone."""
    python("-W", "error", "-c", IMPORT)


MISTYPED = """
import torch
import purestep as ps

def loss_fn(params: dict[str, torch.Tensor], row: dict[str, torch.Tensor]) -> torch.Tensor:
    return params["w"] * row["x"]

params, row = {"w": torch.zeros(2)}, {"x": torch.ones(2)}
optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1))
step, opt_state = ps.make_update_step(loss_fn, optimizer), optimizer.init(params)
params, opt_state, metrics = step(params, opt_state, [row])
print(opt_state[1].mu, ps.make_update_step(lambda w, x: w * x, ps.optim.sgd(0.1)))
step(opt_state, params, [row])
step(params, [row], opt_state)
step(params, opt_state, row)
step(torch.nn.Linear(1, 1), opt_state, [row])
"""


def test_swapped_arguments_have_other_types(tmp_path: Path) -> None:
    """A right call passes mypy, a lambda too; a dict for a list and a module for params do not."""
    program = tmp_path / "program.py"
    program.write_text(MISTYPED)
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        str(program),
    ]  # on what mypy has cached of the package
    run = subprocess.run(mypy, capture_output=True, text=True, timeout=240, cwd=ROOT)
    lines = {
        int(line.split(":")[1]) for line in run.stdout.splitlines() if "error:" in line
    }
    calls = MISTYPED.splitlines().index("step(opt_state, params, [row])") + 1
    assert lines == {*range(calls, calls + 4)}, run.stdout + run.stderr


def test_public_names_show_an_example() -> None:
    """Every public function and class runs in its docstring."""
    for namespace in (ps, ps.optim, ps.losses, ps.random, ps.checkpoint, ps.testing):
        for name, value in vars(namespace).items():
            plain = inspect.isfunction(value) or inspect.isclass(value)
            if plain and name[0] != "_" and value.__module__.startswith("purestep"):
                assert ">>>" in (inspect.getdoc(value) or ""), f"{name} has no example"


NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


def foreign_names(source: str) -> set[str]:
    """The names in one file that begin with an underscore and are defined neither there nor by Python."""

    def used() -> Iterator[str]:
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "os")):
                    pass
                case ast.Attribute(attr=name):
                    yield name
                case ast.ImportFrom(module=str(path), names=names):
                    yield from [*path.split("."), *(each.name for each in names)]
                case ast.Import(names=names):
                    yield from (part for each in names for part in each.name.split("."))
                case ast.Call(
                    func=ast.Name(
                        id="getattr" | "hasattr" | "attrgetter" | "methodcaller"
                    ),
                    args=args,
                ):
                    texts = (
                        each.value for each in args if isinstance(each, ast.Constant)
                    )
                    yield from (part for text in texts for part in str(text).split("."))

    tree = ast.parse(source)
    own = r"^ *(?:def|class) (_\w+)|^(_\w+)\b.* = |\bself\.(_\w+)\b(?=.* = )"
    own_names = {*itertools.chain(*re.findall(own, source, re.M))} | NAMED_TUPLES
    return {name for name in used() if re.match(r"_[^_]", name)} - own_names


@pytest.mark.parametrize("folder", ["purestep", "proofs", "tests", "benchmarks"])
def test_private_names_of_torch_stand_in_one_place(folder: str) -> None:
    """In purestep/torch_private.py, and what only tests look through in tests/torch_private.py."""
    files = [
        file
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "torch_private.py"
    ]
    found = {str(file): foreign_names(file.read_text()) for file in files}
    assert not {file: names for file, names in found.items() if names}


def test_tests_import_nothing_from_each_other() -> None:
    """What several of them use stands beside them, in a module named after what it holds."""
    for file in (ROOT / "tests").glob("*.py"):
        forbidden = r"^ *(?:from|import) tests(?:\.| import )test_.*"
        found = re.findall(forbidden, file.read_text(), re.M)
        assert not found, f"{file.name}: {found}"


def test_every_package_is_installed() -> None:
    """Not only from a checkout, where all of them are found; each module says what it is."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = [*pkgutil.walk_packages(ps.__path__, "purestep.")]
    assert {*listed} == {"purestep", *(each.name for each in found if each.ispkg)}
    assert all(importlib.import_module(each.name).__doc__ for each in found)


BUILD = "from setuptools import build_meta; build_meta.build_editable('wheel')"
FIND = "import site; site.addsitedir('../site'); from importlib import util; print(util.find_spec('purestep').origin)"


def test_an_editable_install_is_a_line_in_a_pth_file(tmp_path: Path) -> None:
    """Which type checkers read, and which is found beside an empty folder of the package's name."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "purestep"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "wheel").mkdir()
    (tmp_path / "beside" / "purestep").mkdir(parents=True)
    python("-c", BUILD, cwd=tmp_path)
    (wheel,) = (tmp_path / "wheel").iterdir()
    assert wheel.name.startswith(f"purestep-{ps.__version__}-")
    ZipFile(wheel).extractall(tmp_path / "site")
    found = python("-S", "-c", FIND, cwd=tmp_path / "beside")
    assert found.strip() == str(tmp_path / "purestep" / "__init__.py")


BUILD_ALL = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""
USE = """
import importlib.metadata, purestep, torch
from purestep import optim
print(purestep.__file__)
data = importlib.metadata.metadata("purestep")
assert data["Version"] == purestep.__version__ and data["License-Expression"] == "BSD-3-Clause"
step, w = purestep.make_update_step(lambda w, x: w * x, optim.sgd(1.0), weight_fn=torch.ones_like), torch.ones(())
print(float(step(w, optim.sgd(1.0).init(w), [torch.ones(3)])[0]))
"""


def test_wheel_and_sdist_install_into_an_empty_environment(tmp_path: Path) -> None:
    """Only what they need to run stands beside them; the sdist builds the same wheel."""
    source, again, empty = tmp_path / "source", tmp_path / "again", tmp_path / "empty"
    listed = python(
        "-c", "import subprocess; subprocess.run(['git', 'ls-files'], check=True)"
    )
    for name in listed.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    python("-c", BUILD_ALL, cwd=source)
    (sdist,), (wheel,) = (
        (source / "dist").glob("*.tar.gz"),
        (source / "dist").glob("*.whl"),
    )
    with tarfile.open(sdist) as archive:
        archive.extractall(again, filter="data")
    (unpacked,) = again.iterdir()
    assert not (unpacked / "tests").exists()  # which need more of the repository
    python("-c", BUILD_ALL, cwd=unpacked)
    (second,) = (unpacked / "dist").glob("*.whl")
    assert ZipFile(wheel).namelist() == ZipFile(second).namelist()
    assert {"purestep/py.typed", "purestep/testing/README.md"} <= {
        *ZipFile(wheel).namelist()
    }

    python("-m", "venv", "--without-pip", empty)
    own = empty / "bin" / "python"
    python("-m", "pip", "--python", own, "install", "--no-deps", "--no-index", wheel)
    (site,) = (empty / "lib").glob("*/site-packages")
    (site / "others.pth").write_text(
        str(Path(torch.__file__).parent.parent)
    )  # torch and such
    printed = python("-I", "-c", USE, cwd=tmp_path, interpreter=own).split()
    assert printed == [str(site / "purestep" / "__init__.py"), "0.0"]


def test_the_package_shows_its_public_names() -> None:
    assert dir(ps) == sorted([*ps.__all__, "__version__"])
    assert dir(ps.random) == sorted(ps.random.__all__)
    assert all(hasattr(ps.random, name) for name in ps.random.__all__)
    assert {"ThreadAxis", "judge", "laws"} <= {*dir(ps.testing)}
