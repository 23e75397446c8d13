"""Fingerprints: the same in every process, and different where something differs."""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, Flag
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch

import purestep as ps
from purestep import tree
from purestep.fingerprint import describe, fingerprint, said

register: Any = optree.dataclasses.dataclass
static: Any = optree.dataclasses.field


@register(namespace=tree.NAMESPACE)
class Layer:
    """Leaves, and what stands beside them."""

    w: Any
    beside: Any = static(pytree_node=False, default=None)


make: Any = Layer


class Color(Enum):
    """A choice."""

    RED = 1
    BLUE = 2


class Option(Flag):
    """Some choices."""

    A = 1
    B = 2


@dataclass
class Config:
    """Compared by its fields, and so not hashable."""

    rate: float
    names: set[str] = field(default_factory=set)


class Identity:
    """Nothing to compare; its cache is each process's own."""

    def __init__(self) -> None:
        self.cache = {id(self)}

    def method(self) -> None:
        """Bound to it."""


class Value:
    """Compared by something of its own, which may be a set."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.names == other.names

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"Value({self.names}, {object.__repr__(self)})"


class Unprintable(Value):
    """Nothing that may be printed."""

    def __repr__(self) -> str:
        raise ArithmeticError("not me")


class Touchy(Value):
    """Compared with its own kind alone."""

    def __eq__(self, other: Any) -> bool:
        return bool(self.names == other.names)


class Point(NamedTuple):
    """A tuple with names."""

    x: Any
    y: Any


def twice(x: Any, *_: Any, **how: Any) -> Any:
    """A function."""
    return 2 * x


WORDS = ["a", "b", "c", "dd", "eee", "ffff"]
BESIDE: list[Callable[[], Any]] = [
    lambda: torch.relu,
    lambda: twice,
    lambda: lambda x: x,
    lambda: math.exp,
    lambda: [].append,
    lambda: Identity().method,
    lambda: torch.ops.aten.relu.default,
    lambda: object(),
    Identity,
    lambda: Identity,
    lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()),
    threading.Lock,
    lambda: set(WORDS),
    lambda: frozenset(WORDS),
    lambda: {word: set(WORDS) for word in WORDS},
    lambda: (set(WORDS), [frozenset(WORDS)], deque(WORDS), OrderedDict(a={*WORDS})),
    lambda: functools.partial(twice, *WORDS, key=torch.relu, other={*WORDS}),
    lambda: lambda x: x in {"a", "b", "c", "dd"},
    lambda: math,
    lambda: torch.bfloat16,
    lambda: torch.device("cpu"),
    lambda: Color.RED,
    lambda: Option.A | Option.B,
    lambda: Config(0.5, set(WORDS)),
    lambda: Value(*WORDS),
    lambda: Unprintable(*WORDS),
    lambda: Touchy(*WORDS),
    lambda: {Point(1, 2): Touchy()},
    lambda: Path("a") / "b",
    lambda: re.compile("a|b"),
    lambda: Point(torch.ones(2), None),
    lambda: torch.Generator(),
    lambda: list[int],
    lambda: b"bytes",
    lambda: float("nan"),
]
"""What has been seen to stand beside leaves, and more."""


def all_of_them() -> list[str]:
    """How each is told."""
    return [
        f"{fingerprint([make(torch.zeros(2), of())])} {describe(tree.flatten(make(1.0, of()))[1])}"
        for of in BESIDE
    ]


def test_every_process_has_the_same() -> None:
    """Whatever its addresses, and its order of a set; also where the program is the process's own."""
    program = "import tests.test_fingerprint as t; print(*t.all_of_them(), sep=chr(10))"
    told = [all_of_them()]
    for seed in ("1", "2", "3"):
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        told.append(run.stdout.splitlines())
    for line, *others in zip(*told, strict=True):
        assert others == [line] * 3
        assert " at 0x" not in line


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (torch.float32, torch.bfloat16, ("torch.float32", "torch.bfloat16")),
        (1, 2, ("1", "2")),
        (0.5, 0.25, ("0.5", "0.25")),
        ("left", "right", ("'left'", "'right'")),
        ({"a", "b"}, {"a", "c"}, ("'b'", "'c'")),
        ({"k": {"a"}}, {"k": {"b"}}, ("'a'", "'b'")),
        (torch.relu, torch.tanh, ("relu", "tanh")),
        (Color.RED, Color.BLUE, ("RED", "BLUE")),
        (Config(0.5), Config(0.25), ("0.5", "0.25")),
        (Config(0.5, {"a"}), Config(0.5, {"b"}), ("'a'", "'b'")),
        (Value("a"), Value("b"), (" a", " b")),
        (functools.partial(twice, 1), functools.partial(twice, 2), ("(1)", "(2)")),
        (torch.device("cpu"), torch.device("cuda"), ("cpu", "cuda")),
        (Identity(), object(), ("Identity", "object")),
        (lambda x: x, lambda x: -x, ("<lambda>", "<lambda>")),
        (lambda x: x + 1, lambda x: x + 2, ("<lambda>", "<lambda>")),
    ],
    ids=[
        "dtype", "integer", "float", "string", "set", "dict", "function", "enum", "dataclass",
        "set in a dataclass", "value", "partial", "device", "class", "lambda", "constant",
    ],
)  # fmt: skip
def test_what_differs_is_found_and_told(one: Any, other: Any, words: tuple[str, str]) -> None:
    """On every rank, in words without addresses."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(0.5)
    step = ps.make_update_step(
        lambda p, m: (p.w * m).sum(1), optimizer, weight_fn=lambda m: m[:, 0] > 0, axis=axis
    )

    def on_rank(beside: Any) -> str:
        params = make(torch.zeros(3), beside)
        with pytest.raises(ValueError, match="disagree on params") as info:
            step(params, optimizer.init(params), [torch.ones(2, 3)])
        return str(info.value)

    texts = axis.map(on_rank)([one, other])
    assert texts[0] == texts[1]
    first, second = texts[0].split(" against ")
    assert first != second
    assert words[0] in first
    assert words[1] in second
    assert " at 0x" not in texts[0]


def test_an_index_of_a_device_is_each_ranks_own() -> None:
    assert said(torch.device("cuda:0")) == said(torch.device("cuda:1"))


def test_what_contains_itself() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert said(ring) == "list(1, list(...))"


def test_structures_are_told_as_optree_tells_them() -> None:
    values: list[Any] = [1, None, [], (), (1,), {"b": 1, "a": [2, (3, None)]}, Point(1, {})]
    for value in values:
        structure = tree.flatten(value)[1]
        assert describe(structure) == tree.describe(structure)


def test_what_may_hold_tensors_is_not_remembered() -> None:
    """Lists beside leaves, and functions with tensors in closures, defaults, or bound to them."""
    kept = torch.ones(1000)
    alive = weakref.ref(kept)

    def beside(kept: Any) -> list[Any]:
        return [[kept], lambda x: x + kept, lambda x, y=kept: x + y, kept.add, Config(kept)]

    for each in beside(kept):
        fingerprint(make(torch.zeros(2), each))
    del kept, each
    assert alive() is None


def test_many_leaves_are_not_described_again() -> None:
    """What is known needs no text: Python calls the same few functions for a thousand leaves as for ten."""

    def calls(number: int) -> int:
        value = {f"w{place}": torch.zeros(2, 3) for place in range(number)}
        fingerprint(value)
        called = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal called
            called += event == "call" and frame.f_globals["__name__"].startswith("purestep")

        before = sys.getprofile()
        gc.collect()  # What it calls is nobody's here.
        sys.setprofile(count)
        try:
            fingerprint(value)
        finally:
            sys.setprofile(before)
        return called

    assert calls(1000) == calls(10)
