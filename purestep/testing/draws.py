"""Cases from choices: drawn at random, and made simpler where a claim about them fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Place: TypeAlias = tuple[int, ...]
Made: TypeAlias = dict[Place, int]
"""Which option is chosen at a place. Choices keep their places when others are changed."""


@dataclass
class Draw:
    """Choices: at some places ``made``, at others random. The first option is the simplest."""

    made: Made
    random: random.Random | None = None
    used: Made = field(default_factory=dict)
    scope: Place = ()
    count: int = 0

    def one(self, options: Sequence[T]) -> T:
        """One of the options."""
        place = (*self.scope, self.count)
        self.count += 1
        other = self.random.randrange(len(options)) if self.random else 0
        self.used[place] = self.made.get(place, other) % len(options)
        return options[self.used[place]]

    def many(self, numbers: Sequence[int]) -> list[Draw]:
        """One of these numbers of draws, each with choices beside the others'."""
        scope = (*self.scope, self.count)
        return [
            replace(self, scope=(*scope, at), count=0)
            for at in range(self.one(numbers))
        ]

    def order(self, items: Sequence[T]) -> list[T]:
        """The items in any order."""
        left = list(items)
        return [left.pop(self.one(range(len(left)))) for _ in items]


def counterexample(
    case: Callable[[Draw], Any],
    claim: Callable[[Any], Any],
    most: int,
    shrink: int,
    seed: object,
) -> AssertionError | None:
    """What the claim says of the smallest case found in which it fails; None: it held in all.

    Args:
        case: makes a case of choices. The first of them takes its options in turn.
        claim: raises ``AssertionError`` where it does not hold.
        most: how many cases are tried.
        shrink: on how many further cases a smaller one is sought.
        seed: what the cases are drawn from.

    >>> def claim(numbers):
    ...     assert sum(numbers) < 12, sum(numbers)
    >>> case = lambda draw: [each.one(range(9)) for each in draw.many(range(9))]
    >>> counterexample(case, claim, most=10, shrink=100, seed=0)
    AssertionError(12)
    """

    def broken(draw: Draw) -> AssertionError | None:
        drawn = case(draw)
        try:
            claim(drawn)
        except AssertionError as error:
            return error
        return None

    for at in range(most):
        draw = Draw({(0,): at}, random.Random(f"{seed} {at}"))
        if error := broken(draw):
            break
    else:
        return None
    seen: list[Made] = []
    before = None
    while before != draw.used:
        before = draw.used
        for change in _changes(before):
            made = {
                place: option for place, option in change(draw.used).items() if option
            }
            if made not in seen and len(seen) < shrink:
                seen.append(made)
                if smaller := broken(other := Draw(made)):
                    draw, error = other, smaller
    return error


def _changes(used: Made) -> list[Callable[[Made], Made]]:
    """What makes choices simpler: one draw of many left out, or made the simplest; one choice."""
    scopes = {place[:end] for place in used for end in range(2, len(place), 2)}
    large = sorted(scopes, key=lambda scope: (len(scope), [-at for at in scope]))
    lower: list[Callable[[int], int]] = [
        lambda at: 0,
        lambda at: at // 2,
        lambda at: at - 1,
    ]
    return [
        *[partial(_without, scope) for scope in large],
        *[partial(_simplest, scope) for scope in large],
        *[partial(_lower, place, step) for place in used for step in lower],
    ]


def _without(scope: Place, made: Made) -> Made:
    *whole, at = scope
    if not made.get((*whole,)):
        return made
    fewer = _simplest(scope, made)
    fewer[(*whole,)] -= 1
    back = len(whole)
    return {
        (*whole, place[back] - 1, *place[back + 1 :])
        if [*place[:back]] == whole and place[back:] > (at,)
        else place: option
        for place, option in fewer.items()
    }


def _simplest(scope: Place, made: Made) -> Made:
    return {place: at for place, at in made.items() if place[: len(scope)] != scope}


def _lower(place: Place, step: Callable[[int], int], made: Made) -> Made:
    return made | {place: step(made[place])} if made.get(place) else made
