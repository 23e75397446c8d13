"""Randomness as data: a draw is a function of a key, which is a tensor, and of coordinates.

Philox4x32-10 [Salmon et al., 2011], in whole numbers: a word of 32 bits follows from a key of 64
bits and four counters. The counters are an element's coordinates within its example, never its
place in memory. So neither padding nor packing nor the cut changes its draw.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.types import Tree

__all__ = [
    "key", "fold_in", "split", "bits", "uniform", "normal", "bernoulli", "dropout",
    "PackedKeys", "token_keys", "with_keys",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


# 32 bits: an int, or a tensor of dtype int64.
_Word: TypeAlias = Any

_LOW = 2**32 - 1

# The third and the fourth counter of a new key: what it is made for, and a coordinate that no
# example has, so that no draw shares its counters.
_FOLD, _SPLIT, _DIMENSION = range(3)
_NEW_KEY = _LOW


class PackedKeys(NamedTuple):
    """Each token's key, and its position in its example, for rows of several examples.

    ``token_keys`` makes them. ``dropout`` and ``fold_in`` take them instead of keys.

    >>> packed = PackedKeys(torch.tensor([[5, 5, 6]]), torch.tensor([[0, 1, 0]]))
    >>> dropout(torch.ones(1, 3), 0.5, packed)[:, 2] == dropout(torch.ones(1), 0.5, torch.tensor(6))
    tensor([True])
    """

    keys: Tensor
    positions: Tensor


Keys: TypeAlias = Tensor | PackedKeys
_K = TypeVar("_K", bound=Tensor | PackedKeys)


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Makes the key of a seed: an int64 tensor of shape (). A tensor with dimensions is many keys.

    Draw once from each key. For several draws, make keys with ``fold_in`` or ``split``.

    >>> [hex(word) for word in bits(key(0), (4,)).tolist()]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    if not (isinstance(seed, int) and -(2**63) <= seed < 2**64):
        raise ValueError(f"key: {seed=} must be a whole number of 64 bits")
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device=device)


def fold_in(key: _K, data: int | Tensor) -> _K:
    """Makes a new key from a key and a number: of the step, the layer, the place in the program.

    Tensors broadcast.

    >>> a, b = fold_in(key(0), torch.arange(2))
    >>> bool(a != b), bool(b == fold_in(key(0), 1))
    (True, True)
    """
    if isinstance(key, PackedKeys):
        return cast(_K, PackedKeys(fold_in(key.keys, data), key.positions))
    if isinstance(data, Tensor) and (data.is_floating_point() or data.is_complex()):
        raise TypeError(
            f"fold_in: data is {tree.format_leaf(data)}, and must be whole numbers"
        )
    return cast(_K, _new_key(key, data, _FOLD))


def split(key: Tensor, number: int = 2) -> Tensor:
    """Makes ``number`` new keys, along a new last dimension.

    >>> a, b = split(key(0))
    >>> split(torch.stack([a, b]), 3).shape
    torch.Size([2, 3])
    """
    _check_keys(key)
    return _new_key(key[..., None], torch.arange(number, device=key.device), _SPLIT)


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draws 32 random bits for each element: integers from 0 to 2³² − 1, of dtype int64.

    ``shape`` is the shape of one key's draw: keys of shape ``(rows,)`` give ``(rows, *shape)``. An
    element depends on its key and its coordinates only. So a larger shape, with the same number of
    dimensions, begins with the same elements.

    >>> bits(key(0), (2, 3))[:, :2].equal(bits(key(0), (5, 2))[:2])
    True
    """
    return _drawn(key, shape, lambda word: word)


def uniform(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draws from [0, 1): multiples of 2⁻²⁴ in float32, of 2⁻³² in float64, of 2⁻⁸ in bfloat16.

    The numbers are exact, so they are the same on every device.

    >>> uniform(key(0), (2,))
    tensor([0.3990, 0.8805])
    """
    digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (bits(key, shape) >> (32 - digits)).to(dtype) * 2.0**-digits


def normal(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draws normal numbers of mean 0 and deviation 1: Φ⁻¹((bits + ½) / 2³²), at most 6.338 from 0.

    They are computed in float64, and rounded to ``dtype`` once. The bits are the same on every
    device. The last digit of Φ⁻¹ may differ between devices.

    >>> normal(key(0), (2,))
    tensor([-0.2558,  1.1776])
    """
    middle = (bits(key, shape).to(torch.float64) + 0.5) * 2.0**-32
    quantile: Tensor = torch.special.ndtri(middle)
    return quantile.to(dtype)


def bernoulli(key: Tensor, p: float, shape: Sequence[int] = ()) -> Tensor:
    """Draws True with probability p, rounded to a multiple of 2⁻³².

    >>> bernoulli(key(0), 0.5, (4,))
    tensor([ True, False, False, False])
    """
    return _drawn(key, shape, below(p))


def dropout(x: Tensor, p: float, key: Keys) -> Tensor:
    """Returns ``x / (1 - p)``, with 0 where ``bernoulli(key, p)`` is True.

    Keys of shape ``(rows,)`` belong to the rows of ``x``. Each row draws from its own key, by the
    coordinates within the row. So the draw does not depend on the padding, nor on the rest of the
    batch.

    Where a row holds several examples, as in ``pack_documents``, pass ``token_keys``. Then ``x`` is
    ``(rows, length, features)`` or ``(rows, length)``, or attention weights of
    ``(rows, heads, length, length)``. Each token draws as if its example stood alone.

    >>> x = torch.ones(2, 3)
    >>> keys = torch.stack([key(1), key(2)])
    >>> dropout(x, 0.5, keys)
    tensor([[2., 2., 2.],
            [0., 0., 2.]])
    >>> dropout(x[1:, :2], 0.5, keys[1:])
    tensor([[0., 0.]])
    """
    words = below(p)
    if p == 0:
        return x
    return scaled(x, drawn_for(x, key, words), p)


def scaled(x: Tensor, dropped: Tensor, p: float) -> Tensor:
    """``x / (1 - p)``, with 0 where ``dropped`` is True.

    >>> scaled(torch.ones(2), torch.tensor([True, False]), 0.75)
    tensor([0., 4.])
    """
    return torch.where(dropped, 0, x * (1 / (1 - p) if p < 1 else 0.0))


def token_keys(keys: Tensor, segments: Tensor, positions: Tensor) -> PackedKeys:
    """Makes the keys of tokens in rows of several examples, from the leaves of ``pack_documents``.

    Args:
        keys: of the examples, ``(rows, most segments of a row)``.
        segments: of the tokens, ``(rows, length)``: from 1, and 0 for padding.
        positions: of the tokens in their examples, ``(rows, length)``.

    >>> segments, positions = torch.tensor([[1, 1, 2]]), torch.tensor([[0, 1, 0]])
    >>> packed = token_keys(torch.tensor([[5, 6]]), segments, positions)
    >>> packed.keys
    tensor([[5, 5, 6]])
    >>> alone = dropout(torch.ones(1, 1, 4), 0.5, torch.tensor([6]))
    >>> dropout(torch.ones(1, 3, 4), 0.5, packed)[:, 2:].equal(alone)
    True
    """
    _check_keys(keys)
    if segments.shape != positions.shape or keys.shape[:-1] != segments.shape[:-1]:
        raise ValueError(
            f"token_keys: keys {tuple(keys.shape)}, segments {tuple(segments.shape)} and positions "
            f"{tuple(positions.shape)} must be those of pack_documents: (rows, segments), "
            "(rows, length), (rows, length)"
        )
    of_token = torch.gather(keys, -1, (segments.to(torch.int64) - 1).clamp(min=0))
    return PackedKeys(of_token, positions.to(torch.int64))


def with_keys(
    examples: Iterable[Mapping[str, Tree]],
    key: Tensor,
    *,
    start: int = 0,
    identity: str | None = None,
    name: str = "key",
) -> list[dict[str, Tree]]:
    """Adds a key to each example: ``fold_in(key, number)``, with the example's number in the data.

    Call it before you pack. A key has no dimension, so ``pack`` stacks keys to ``(rows,)``, and
    ``pack_documents`` to ``(rows, most segments)``. For new noise in each epoch or step, pass
    ``fold_in(key, step)``.

    Args:
        examples: mappings by name.
        key: one key for all of them.
        start: the number of the first example.
        identity: the name of an integer leaf to fold in instead of the number.
        name: the name of the new leaf.

    >>> examples = [{"tokens": torch.arange(n)} for n in (3, 1)]
    >>> keyed = with_keys(examples, key(0))
    >>> bool(keyed[1]["key"] == fold_in(key(0), 1))
    True
    """
    examples = [dict(example) for example in examples]
    for i, example in enumerate(examples):
        if name in example:
            raise ValueError(
                f"with_keys: examples[{i}] has {name!r} already: choose a free name="
            )
        if identity is not None and identity not in example:
            raise ValueError(
                f"with_keys: examples[{i}] has no {identity!r}, only {[*example]}"
            )
    if not examples:
        return []
    numbers = torch.arange(start, start + len(examples), device=key.device)
    if identity is not None:
        numbers = torch.stack([torch.as_tensor(each[identity]) for each in examples])
        if numbers.ndim != 1:
            raise ValueError(
                f"with_keys: {identity!r} must be one whole number in each example"
            )
    keys = fold_in(key, numbers.to(key.device)).unbind()
    return [{**example, name: own} for example, own in zip(examples, keys, strict=True)]


def drawn_for(x: Tensor, key: Keys, of: Callable[[Tensor], Tensor]) -> Tensor:
    """``of(word)`` for the word that ``dropout`` draws for each element of x.

    >>> drawn_for(torch.ones(2), key(0), lambda word: word).equal(bits(key(0), (2,)))
    True
    """
    _check_keys(key.keys if isinstance(key, PackedKeys) else key)
    if isinstance(key, PackedKeys):
        return _drawn_for_tokens(x.shape, key, of)
    if x.shape[: key.ndim] != key.shape:
        raise ValueError(
            f"keys of shape {tuple(key.shape)} for {tree.format_leaf(x)}: its first "
            "dimensions must be "
            "those of the keys, one key for each example"
        )
    return _drawn(key, x.shape[key.ndim :], of)


def _drawn(key: Tensor, shape: Sequence[int], of: Callable[[Tensor], Tensor]) -> Tensor:
    """``of(word)`` for each element, whose coordinates are the counters, the last one first."""
    _check_keys(key)
    if not shape:
        return of(philox(key, (0, 0, 0, 0))[0])
    while len(shape) > 4:
        key = _new_key(
            key[..., None], torch.arange(shape[0], device=key.device), _DIMENSION
        )
        shape = shape[1:]
    *others, last = shape
    coordinates = [
        torch.arange(size, device=key.device).view(-1, *[1] * after)
        for size, after in zip(others, range(len(others), 0, -1), strict=True)
    ]
    return _drawn_by_fours(
        key.view(*key.shape, *[1] * len(shape)), coordinates, last, of
    )


def _drawn_by_fours(
    key: Tensor,
    coordinates: Sequence[Tensor],
    last: int,
    of: Callable[[Tensor], Tensor],
) -> Tensor:
    """The last coordinate counts by fours, since there are four words to a counter."""
    fours = torch.arange(-(-last // 4), device=key.device)
    words = philox(key, _counters([*coordinates, fours]))
    return torch.stack([of(word) for word in words], -1).flatten(-2)[..., :last]


def _drawn_for_tokens(
    shape: Sequence[int], key: PackedKeys, of: Callable[[Tensor], Tensor]
) -> Tensor:
    keys, positions = key
    if (*shape[:-1],) == keys.shape:
        return _drawn_by_fours(keys[..., None], [positions[..., None]], shape[-1], of)
    if (*shape[:-3], *shape[-2:]) == (*keys.shape, *keys.shape[-1:]):
        heads = torch.arange(shape[-3], device=keys.device).view(-1, 1, 1)
        last, own = positions[..., None, None, :], keys[..., None, :, None]
        others = [heads, positions[..., None, :, None]]
    elif (*shape,) == keys.shape:
        last, own, others = positions, keys, []
    else:
        raise ValueError(
            f"token keys of shape {tuple(keys.shape)} for a tensor of shape {tuple(shape)}: its "
            "dimensions must be (rows, length, features), (rows, heads, length, length) or "
            "(rows, length)"
        )
    one, two, three, four = map(of, philox(own, _counters([*others, last >> 2])))
    odd, high = (last & 1) == 1, (last & 2) == 2
    return torch.where(high, torch.where(odd, four, three), torch.where(odd, two, one))


def _counters(coordinates: Sequence[Tensor]) -> tuple[_Word, _Word, _Word, _Word]:
    """The last coordinate first; a missing one counts as 0."""
    one, two, three, four = [*coordinates[::-1], 0, 0, 0][:4]
    return one, two, three, four


# Less 2³², so that products with a word of 32 bits stay within 63.
_FACTORS = 0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32
_STEPS = 0x9E3779B9, 0xBB67AE85


def philox(
    key: _Word, counters: tuple[_Word, _Word, _Word, _Word]
) -> tuple[_Word, _Word, _Word, _Word]:
    """The four words of a key and four counters, all of which broadcast.

    >>> [hex(word) for word in philox(0, (0, 0, 0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    first, second, third, fourth = counters
    low, high = key & _LOW, key >> 32
    for turn in range(10):
        # Only words of 32 bits are multiplied; higher bits are cut off in time. Otherwise torch's
        # compiler multiplies a result of arange in 32 bits, too (pytorch#175966).
        first, third = first & _LOW, third & _LOW
        one, two = first * _FACTORS[0], third * _FACTORS[1]
        # The upper half of the product is that of this one, plus the word that 2³² multiplied.
        first, second, third, fourth = (
            ((two >> 32) + third) ^ second ^ (low + turn * _STEPS[0]),
            two,
            ((one >> 32) + first) ^ fourth ^ (high + turn * _STEPS[1]),
            one,
        )
    return first & _LOW, second & _LOW, third & _LOW, fourth & _LOW


def _new_key(key: Tensor, number: int | Tensor, purpose: int) -> Tensor:
    """A key from a key, a number and the purpose, with counters that no draw has."""
    _check_keys(key)
    wide = number.to(torch.int64) if isinstance(number, Tensor) else number
    low, high, _, _ = philox(key, (wide & _LOW, (wide >> 32) & _LOW, purpose, _NEW_KEY))
    made: Tensor = low | (high << 32)
    return made


def below(p: float) -> Callable[[Tensor], Tensor]:
    """Which words are among the lowest, which come with probability p.

    >>> below(0.5)(torch.tensor([2**31 - 1, 2**31]))
    tensor([ True, False])
    """
    if not 0 <= p <= 1:
        raise ValueError(f"{p=} must be a probability, from 0 to 1")
    limit = round(p * 2**32)
    return lambda word: word < limit


def _check_keys(key: Any) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        raise TypeError(
            f"{tree.format_leaf(key)} is no key: keys are tensors of dtype int64, as "
            "ps.random.key(seed) "
            "makes them"
        )
