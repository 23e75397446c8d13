"""The package: its import, its names, its installation."""

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

import purestep as ps

ROOT = Path(__file__).parent.parent


def run(command: list[Any], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)


def python(*args: Any, cwd: Path = ROOT, interpreter: Any = sys.executable) -> str:
    """Runs a program that must end well, and without a warning if ``-W`` asks for that."""
    result = run([interpreter, *args], cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    if "-W" in args:
        assert result.stderr == ""
    return result.stdout


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
late |= {f"purestep.compiling.{name}" for name in ("nodes", "products", "workarounds")}
assert not late & new, late & new
params, apply = purestep.from_module(torch.nn.Linear(2, 2))
optimizer = purestep.optim.adamw(0.1)
step = purestep.make_update_step(lambda p, x: apply(p, x).square(), optimizer, weight_fn=torch.ones_like)
step(params, optimizer.init(params), [torch.ones(3, 2)])
assert "torch._dynamo" not in sys.modules, "an eager update imports the compiler"
"""


def test_import_is_light_and_silent() -> None:
    """Only einops, safetensors and the package are loaded on top of torch and optree."""
    python("-W", "error", "-c", IMPORT)


def is_public(name: str, value: Any) -> bool:
    """Returns whether this is a public function or class of the package."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return False
    return name[0] != "_" and value.__module__.startswith("purestep")


@pytest.mark.parametrize(
    "namespace",
    [ps, ps.optim, ps.losses, ps.random, ps.checkpoint, ps.testing],
    ids=lambda namespace: namespace.__name__,
)
def test_public_names_show_an_example(namespace: Any) -> None:
    """Every public function and class runs in its docstring."""
    for name, value in vars(namespace).items():
        if is_public(name, value):
            doc = inspect.getdoc(value) or ""
            assert ">>>" in doc, f"{name} has no example"


# Private names

NAMED_TUPLES = {"_asdict", "_fields", "_replace"}
READERS = {"getattr", "hasattr", "attrgetter", "methodcaller"}
"""Functions that take the name of an attribute as text."""


def names_used(source: str) -> Iterator[str]:
    """Yields the names of attributes, also in texts, and the parts of imported names."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "os")):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(module=str(path), names=aliases):
                yield from path.split(".")
                yield from (alias.name for alias in aliases)
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield from alias.name.split(".")
            case ast.Call(func=ast.Name(id=reader), args=args) if reader in READERS:
                for arg in args:
                    if isinstance(arg, ast.Constant):
                        yield from str(arg.value).split(".")


def names_defined(source: str) -> set[str]:
    """Lists the names with an underscore that a file defines: functions, variables, attributes."""
    function = r"^ *(?:def|class) (_\w+)"
    variable = r"^(_\w+)\b.* = "
    attribute = r"\bself\.(_\w+)\b(?=.* = )"
    matches = re.findall(f"{function}|{variable}|{attribute}", source, re.MULTILINE)
    return {name for groups in matches for name in groups}


def foreign_names(source: str) -> set[str]:
    """Lists the names that begin with one underscore and that neither the file nor Python defines."""
    private = {name for name in names_used(source) if re.match(r"_[^_]", name)}
    return private - names_defined(source) - NAMED_TUPLES


@pytest.mark.parametrize(
    "folder", ["purestep", "proofs", "support", "tests", "benchmarks"]
)
def test_private_names_of_torch_stand_in_one_place(folder: str) -> None:
    """In purestep/torch_private.py, and what only tests look through in support/torch_private.py."""
    foreign = {}
    for file in (ROOT / folder).rglob("*.py"):
        names = foreign_names(file.read_text())
        if names and file.name != "torch_private.py":
            foreign[str(file)] = names
    assert not foreign


def test_tests_import_nothing_from_each_other() -> None:
    """Helpers of several tests stand in modules named after what they hold."""
    forbidden = r"^ *(?:from|import) tests(?:\.| import )test_.*"
    for file in (ROOT / "tests").glob("*.py"):
        imports = re.findall(forbidden, file.read_text(), re.MULTILINE)
        assert not imports, f"{file.name}: {imports}"


# Installation


def test_every_package_is_installed() -> None:
    """Not only from a checkout, where all of them are found; each module says what it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    modules = list(pkgutil.walk_packages(ps.__path__, "purestep."))
    packages = {module.name for module in modules if module.ispkg}

    assert set(listed) == packages | {"purestep"}
    for module in modules:
        assert importlib.import_module(module.name).__doc__


BUILD = "from setuptools import build_meta; build_meta.build_editable('wheel')"
FIND = """
import site
from importlib import util
site.addsitedir("../site")
print(util.find_spec("purestep").origin)
"""


def test_an_editable_install_is_a_line_in_a_pth_file(tmp_path: Path) -> None:
    """Type checkers read it, and it wins over an empty folder of the package's name."""
    top = ("pyproject.toml", "README.md", "LICENSE", "purestep", "pytest_purestep.py")
    for name in top:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "wheel").mkdir()
    empty = tmp_path / "empty"
    (empty / "purestep").mkdir(parents=True)

    python("-c", BUILD, cwd=tmp_path)

    (wheel,) = (tmp_path / "wheel").iterdir()
    assert wheel.name.startswith(f"purestep-{ps.__version__}-")
    ZipFile(wheel).extractall(tmp_path / "site")
    origin = python("-S", "-c", FIND, cwd=empty).strip()
    assert origin == str(tmp_path / "purestep" / "__init__.py")


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


def copy_repository(target: Path) -> None:
    """Copies the files that git tracks."""
    list_files = "import subprocess; subprocess.run(['git', 'ls-files'], check=True)"
    for name in python("-c", list_files).splitlines():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def build(source: Path) -> tuple[Path, Path]:
    """Builds an sdist and a wheel of these files."""
    python("-c", BUILD_ALL, cwd=source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    (wheel,) = (source / "dist").glob("*.whl")
    return sdist, wheel


def make_environment(folder: Path, wheel: Path) -> Path:
    """Installs the wheel, with torch and such beside it; returns the folder of packages."""
    python("-m", "venv", "--without-pip", folder)
    interpreter = folder / "bin" / "python"
    pip = ("-m", "pip", "--python", interpreter)
    python(*pip, "install", "--no-deps", "--no-index", wheel)
    (site,) = (folder / "lib").glob("*/site-packages")
    dependencies = Path(torch.__file__).parent.parent
    (site / "others.pth").write_text(str(dependencies))
    return site


def test_wheel_and_sdist_install_into_an_empty_environment(tmp_path: Path) -> None:
    """Only what they need to run stands beside them; the sdist builds the same wheel."""
    source = tmp_path / "source"
    copy_repository(source)
    sdist, wheel = build(source)
    names = ZipFile(wheel).namelist()
    assert "purestep/py.typed" in names
    assert "purestep/testing/README.md" in names
    assert "pytest_purestep.py" in names

    unpacked_in = tmp_path / "unpacked"
    unpacked_in.mkdir()
    subprocess.run(["tar", "-xf", sdist, "-C", unpacked_in], check=True, timeout=60)
    (unpacked,) = unpacked_in.iterdir()
    # Tests need more of the repository.
    assert not (unpacked / "tests").exists()
    _, wheel_of_sdist = build(unpacked)
    assert ZipFile(wheel_of_sdist).namelist() == names

    environment = tmp_path / "environment"
    site = make_environment(environment, wheel)
    interpreter = environment / "bin" / "python"
    printed = python("-I", "-c", USE, cwd=tmp_path, interpreter=interpreter)
    assert printed.split() == [str(site / "purestep" / "__init__.py"), "0.0"]


def test_the_package_shows_its_public_names() -> None:
    assert dir(ps) == sorted([*ps.__all__, "__version__"])
    assert dir(ps.random) == sorted(ps.random.__all__)
    for name in ps.random.__all__:
        assert hasattr(ps.random, name)
    assert {"ThreadAxis", "run_laws", "law_tests"} <= set(dir(ps.testing))
