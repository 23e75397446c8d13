"""Draws cases from choices: at random, and simpler ones after a claim about them fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Address: TypeAlias = tuple[int, ...]
"""Where a choice is asked for: its number among the choices of one draw, after the address of that
draw: ``(*scope, number)``. The scope of draw 2 of ``many``, asked for at (3,), is (3, 2)."""
Choices: TypeAlias = dict[Address, int]
"""Which option is chosen at an address. Choices keep their addresses when others are changed."""


@dataclass
class Draw:
    """Makes choices: at some addresses those of ``choices``, at others random ones by ``rng``.

    Without ``rng`` others are the first option, which is the simplest. ``used`` notes the position
    of each option chosen. The draws of ``many`` share it. The next choice has the address
    ``(*scope, count)``.
    """

    choices: Choices
    rng: random.Random | None = None
    used: Choices = field(default_factory=dict)
    scope: Address = ()
    count: int = 0

    def one(self, options: Sequence[T]) -> T:
        """Returns the option chosen at the current address, and goes on to the next address.

        The position is that in ``choices``, modulo the number of options. If there is none, it is
        random by ``rng``, or 0 without ``rng``. It is noted in ``used``.
        """
        address = (*self.scope, self.count)
        self.count += 1
        # Drawn even if the choice is fixed: else later choices would be other ones.
        default = self.rng.randrange(len(options)) if self.rng else 0
        index = self.choices.get(address, default) % len(options)
        self.used[address] = index
        return options[index]

    def many(self, numbers: Sequence[int]) -> list[Draw]:
        """Chooses one of the numbers by ``one``, and returns as many draws, in separate scopes."""
        scope = (*self.scope, self.count)
        draws = []
        for i in range(self.one(numbers)):
            draws.append(Draw(self.choices, self.rng, self.used, (*scope, i)))
        return draws

    def order(self, items: Sequence[T]) -> list[T]:
        """Returns the items in an order that it draws.

        With neither ``rng`` nor choices, that is the order of ``items``.
        """
        rest = list(items)
        ordered = []
        while rest:
            index = self.one(range(len(rest)))
            ordered.append(rest.pop(index))
        return ordered


def counterexample(
    case: Callable[[Draw], Any],
    claim: Callable[[Any], Any],
    most: int,
    shrink: int,
    seed: object,
) -> AssertionError | None:
    """Returns the error of the smallest case found in which the claim fails; None if all hold.

    The same seed gives the same cases. An exception that ``case`` raises passes through, and so
    does one of ``claim`` that is no ``AssertionError``.

    Args:
        case: makes a case by a ``Draw``. Its first choice takes each option in turn.
        claim: raises ``AssertionError`` where it does not hold.
        most: how many cases are tried, up to the first in which the claim fails.
        shrink: on how many further cases a smaller one is sought, at most.
        seed: what the cases are drawn from.

    >>> def claim(numbers):
    ...     assert sum(numbers) < 12, sum(numbers)
    >>> case = lambda draw: [each.one(range(9)) for each in draw.many(range(9))]
    >>> counterexample(case, claim, most=10, shrink=100, seed=0)
    AssertionError(12)
    """

    def find_error(draw: Draw) -> AssertionError | None:
        drawn = case(draw)
        try:
            claim(drawn)
        except AssertionError as error:
            return error
        return None

    for number in range(most):
        rng = random.Random(f"{seed} {number}")
        draw = Draw({(0,): number}, rng)
        error = find_error(draw)
        if error is not None:
            return _Shrinker(draw, error, find_error, shrink).shrink()
    return None


@dataclass
class _Shrinker:
    """Makes the choices of a draw simpler for as long as the claim still fails.

    ``find_error`` returns the claim's error for a draw, or None. At most ``most`` draws are tried.
    """

    draw: Draw
    error: AssertionError
    find_error: Callable[[Draw], AssertionError | None]
    most: int
    tried: list[Choices] = field(default_factory=list)

    def shrink(self) -> AssertionError:
        """Tries changes until none makes the draw simpler, or until ``most`` draws are tried.

        Returns the error of the simplest draw in which the claim still fails.
        """
        before = None
        while before != self.draw.used:
            before = self.draw.used
            self._try_changes(before)
        return self.error

    def _try_changes(self, used: Choices) -> None:
        """Tries to leave out draws of ``used``, to reset them, and to lower single choices.

        Each change in which the claim still fails replaces ``draw`` and ``error`` at once.
        """
        scopes = _list_scopes(used)
        for scope in scopes:
            self._try(_remove_draw(scope, self.draw.used))
        for scope in scopes:
            self._try(_reset_draw(scope, self.draw.used))
        for address in used:
            self._try(_lower(address, self.draw.used, lambda option: 0))
            self._try(_lower(address, self.draw.used, lambda option: option // 2))
            self._try(_lower(address, self.draw.used, lambda option: option - 1))

    def _try(self, changed: Choices) -> None:
        # An option 0 is what a draw takes by itself.
        choices = {}
        for address, option in changed.items():
            if option:
                choices[address] = option
        if choices in self.tried or len(self.tried) >= self.most:
            return
        self.tried.append(choices)
        simpler = Draw(choices)
        error = self.find_error(simpler)
        if error is not None:
            self.draw = simpler
            self.error = error


def _list_scopes(used: Choices) -> list[Address]:
    """Lists the scopes of the draws of ``many`` that made a choice.

    Outer scopes stand before inner ones, and of the draws of one ``many`` the last stands first.
    """
    scopes: set[Address] = set()
    for address in used:
        for end in range(2, len(address), 2):
            scopes.add(address[:end])

    def rank(scope: Address) -> tuple[int, list[int]]:
        backwards = [-i for i in scope]
        return len(scope), backwards

    return sorted(scopes, key=rank)


def _remove_draw(scope: Address, choices: Choices) -> Choices:
    """Returns the choices with one draw of ``many`` left out, and those behind it moved up.

    The choice of their number is lowered by one. If it is already the lowest option, the function
    returns ``choices``.
    """
    parent = scope[:-1]
    index = scope[-1]
    if not choices.get(parent):
        return choices
    fewer = _reset_draw(scope, choices)
    fewer[parent] -= 1
    depth = len(parent)
    moved = {}
    for address, option in fewer.items():
        rest = address[depth:]
        if address[:depth] == parent and rest > (index,):
            address = (*parent, rest[0] - 1, *rest[1:])
        moved[address] = option
    return moved


def _reset_draw(scope: Address, choices: Choices) -> Choices:
    """Returns the choices without those of one draw, which then takes first options."""
    depth = len(scope)
    rest = {}
    for address, option in choices.items():
        if address[:depth] != scope:
            rest[address] = option
    return rest


def _lower(
    address: Address,
    choices: Choices,
    step: Callable[[int], int],
) -> Choices:
    """Returns the choices with ``step`` applied to the one at an address.

    If that is 0 or missing, the function returns ``choices``.
    """
    option = choices.get(address)
    if not option:
        return choices
    return {**choices, address: step(option)}
