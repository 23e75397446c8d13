"""Draws random numbers as a function of a key, which is a tensor, and of coordinates.

The generator is Philox4x32-10 [Salmon et al., 2011], computed in integers: it makes a word of 32
bits from a key of 64 bits and four counters. The counters are an element's coordinates within its
example, never its position in memory. So neither padding nor packing nor the cut into microbatches
changes its draw.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, TypeVar, cast

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


_Word: TypeAlias = Any
"""32 bits: an int, or a tensor of dtype int64."""

_Words: TypeAlias = tuple[_Word, _Word, _Word, _Word]

WordFn: TypeAlias = Callable[[Tensor], Tensor]
"""Makes a draw of each word."""

_LOW = 2**32 - 1

# The fourth counter where a new key is made. No example has this coordinate, so no draw shares the
# counters of a new key. The third counter is the purpose of the new key.
_NEW_KEY = _LOW
_FOLD = 0
_SPLIT = 1
_DIMENSION = 2


class PackedKeys(NamedTuple):
    """Holds each token's key, and its position in its example, for rows of several examples.

    ``token_keys`` makes them. ``dropout`` and ``fold_in`` take them instead of keys.

    >>> packed = PackedKeys(torch.tensor([[5, 5, 6]]), torch.tensor([[0, 1, 0]]))
    >>> dropout(torch.ones(1, 3), 0.5, packed)[:, 2] == dropout(torch.ones(1), 0.5, torch.tensor(6))
    tensor([True])
    """

    keys: Tensor
    positions: Tensor


KeyOrPackedKeys: TypeAlias = Tensor | PackedKeys
_K = TypeVar("_K", bound=Tensor | PackedKeys)


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Makes the key of a seed: an int64 tensor of shape (). A tensor with dimensions is many keys.

    The seed is an int from −2⁶³ to 2⁶⁴ − 1; others raise ``ValueError``. Draw once from each key.
    For several draws, make keys with ``fold_in`` or ``split``. Where keys are
    used, those of another dtype than int64 raise ``TypeError``.

    >>> [hex(word) for word in bits(key(0), (4,)).tolist()]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    has_64_bits = isinstance(seed, int) and -(2**63) <= seed < 2**64
    if not has_64_bits:
        raise ValueError(f"key: {seed=} must be a whole number of 64 bits")
    if seed >= 2**63:
        seed -= 2**64  # the same bits in int64
    return torch.tensor(seed, dtype=torch.int64, device=device)


def fold_in(key: _K, data: SupportsIndex | Tensor) -> _K:
    """Makes a new key from a key and a number: of the step, the layer, the call.

    Tensors broadcast. ``PackedKeys`` keep their positions. Of a number, the lowest 64 bits count.
    Raises ``TypeError`` unless it is of an integer type.

    >>> a, b = fold_in(key(0), torch.arange(2))
    >>> bool(a != b), bool(b == fold_in(key(0), 1))
    (True, True)
    """
    if isinstance(key, PackedKeys):
        folded = fold_in(key.keys, data)
        return cast(_K, PackedKeys(folded, key.positions))
    if isinstance(data, Tensor) and (data.is_floating_point() or data.is_complex()):
        raise TypeError(
            f"fold_in: data is {tree.format_leaf(data)}, and must be whole numbers"
        )
    if not isinstance(data, Tensor | int | torch.SymInt):
        if not hasattr(data, "__index__"):
            raise TypeError(
                f"fold_in takes a whole number, or a tensor of them, got {data!r}: number the "
                "layers, calls or streams, as fold_in(key, 0)"
            )
        data = operator.index(data)  # NumPy's small integers overflow.
    return cast(_K, _make_key(key, cast("int | Tensor", data), _FOLD))


def split(key: Tensor, number: int = 2) -> Tensor:
    """Makes ``number`` new keys of each key, along a new last dimension.

    Raises ``ValueError`` for a negative number and for a Python float.

    >>> a, b = split(key(0))
    >>> split(torch.stack([a, b]), 3).shape
    torch.Size([2, 3])
    """
    _check_keys(key)
    if isinstance(number, float) or number < 0:
        raise ValueError(
            f"split: {number=} of new keys must be whole, and not negative"
        )
    numbers = torch.arange(number, device=key.device)
    return _make_key(key[..., None], numbers, _SPLIT)


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draws 32 random bits for each element: integers from 0 to 2³² − 1, of dtype int64.

    ``shape`` is the shape of one key's draw: keys of shape ``(rows,)`` give ``(rows, *shape)``. An
    element depends on its key and its coordinates only. So a larger shape, with the same number of
    dimensions, begins with the same elements.

    >>> bits(key(0), (2, 3))[:, :2].equal(bits(key(0), (5, 2))[:2])
    True
    """
    return _draw(key, shape, lambda word: word)


def uniform(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draws from [0, 1): multiples of 2⁻²⁴ in float32, of 2⁻³² in float64, of 2⁻⁸ in bfloat16.

    In float16 they are multiples of 2⁻¹¹. The numbers are exact, so they are the same on every
    device. Keys and ``shape`` are those of ``bits``.

    >>> uniform(key(0), (2,))
    tensor([0.3990, 0.8805])
    """
    significant_bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    num_bits = min(32, significant_bits)
    integers = bits(key, shape) >> (32 - num_bits)
    return integers.to(dtype) * 2.0**-num_bits


def normal(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draws normal numbers of mean 0 and deviation 1: Φ⁻¹((bits + ½) / 2³²), at most 6.338 from 0.

    They are computed in float64, and rounded to ``dtype`` once: up to 6.344 in bfloat16, and 6.340
    in float16. The bits are the same on every device. The last digit of Φ⁻¹ may differ between
    devices. Keys and ``shape`` are those of ``bits``.

    >>> normal(key(0), (2,))
    tensor([-0.2558,  1.1776])
    """
    integers = bits(key, shape).to(torch.float64)
    probabilities = (integers + 0.5) * 2.0**-32
    quantiles: Tensor = torch.special.ndtri(probabilities)
    return quantiles.to(dtype)


def bernoulli(key: Tensor, p: float, shape: Sequence[int] = ()) -> Tensor:
    """Draws True with probability p, rounded to a multiple of 2⁻³².

    Keys and ``shape`` are those of ``bits``. Raises ``ValueError`` unless p is from 0 to 1.

    >>> bernoulli(key(0), 0.5, (4,))
    tensor([ True, False, False, False])
    """
    return _draw(key, shape, below_probability(p))


def dropout(x: Tensor, p: float, key: KeyOrPackedKeys) -> Tensor:
    """Returns ``x`` times ``1 / (1 - p)``, with 0 where ``bernoulli(key, p)`` is True.

    If p is 0, it returns ``x`` itself, whatever the keys are, and if p is 1, zeros. Raises
    ``ValueError`` unless p is from 0 to 1, or if the shape of ``x`` does not begin with that of the
    keys. With token keys, it raises ``ValueError`` unless ``x`` has one of the shapes listed below.

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
    is_below = below_probability(p)
    if p == 0:
        return x
    dropped = draw_like(x, key, is_below)
    return zero_and_rescale(x, dropped, p)


def zero_and_rescale(x: Tensor, dropped: Tensor, p: float) -> Tensor:
    """Returns ``x`` times ``1 / (1 - p)``, with 0 where ``dropped`` is True.

    If p is 1, the factor is 0.

    >>> zero_and_rescale(torch.ones(2), torch.tensor([True, False]), 0.75)
    tensor([0., 4.])
    """
    factor = 1 / (1 - p) if p < 1 else 0.0
    return torch.where(dropped, 0, x * factor)


def token_keys(keys: Tensor, segments: Tensor, positions: Tensor) -> PackedKeys:
    """Makes the keys of tokens in rows of several examples, from the leaves of ``pack_documents``.

    Padding gets the key of the row's first example. Raises ``ValueError`` unless the shapes fit,
    and ``TypeError`` unless the keys are int64. If a row has more segments than keys, torch's error
    passes.

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
    has_rows = keys.shape[:-1] == segments.shape[:-1]
    if segments.shape != positions.shape or not has_rows:
        raise ValueError(
            f"token_keys: keys {tuple(keys.shape)}, segments {tuple(segments.shape)} and positions "
            f"{tuple(positions.shape)} must be those of pack_documents: (rows, segments), "
            "(rows, length), (rows, length)"
        )
    index = (segments.to(torch.int64) - 1).clamp(min=0)  # 0 for padding
    keys_of_tokens = torch.gather(keys, -1, index)
    return PackedKeys(keys_of_tokens, positions.to(torch.int64))


def with_keys(
    examples: Iterable[Mapping[str, Tree]],
    key: Tensor,
    *,
    start: int = 0,
    identity: str | None = None,
    name: str = "key",
) -> list[dict[str, Tree]]:
    """Adds a key to each example: ``fold_in(key, number)``, with the example's number in the data.

    It returns new dicts, and the examples stay as they are. Call it before you pack. A key has no
    dimension, so ``pack`` stacks keys to ``(rows,)``, and ``pack_documents`` to
    ``(rows, most segments)``. For new noise in each epoch or step, pass ``fold_in(key, step)``.

    Raises ``ValueError`` if an example has a leaf ``name`` already, or no scalar ``identity``. If
    there are examples, so does a ``key`` with dimensions. Raises ``TypeError`` if the identity is
    None, a string, or a number of no integer type. For other objects, the error of
    ``torch.as_tensor`` passes.

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
    keyed = [dict(example) for example in examples]
    for i, example in enumerate(keyed):
        if name in example:
            raise ValueError(
                f"with_keys: examples[{i}] has {name!r} already: choose a free name="
            )
        if identity is not None and identity not in example:
            raise ValueError(
                f"with_keys: examples[{i}] has no {identity!r}, only {[*example]}"
            )
    if not keyed:
        return []
    _check_one_key(key)
    if identity is None:
        numbers = torch.arange(start, start + len(keyed), device=key.device)
    else:
        identities = []
        for i, example in enumerate(keyed):
            if example[identity] is None or isinstance(example[identity], str):
                raise TypeError(
                    f"with_keys: examples[{i}][{identity!r}] is {example[identity]!r}, no whole "
                    "number: number the examples in the data, or pass identity=None"
                )
            identities.append(torch.as_tensor(example[identity]))
        if any(number.ndim for number in identities):
            raise ValueError(
                f"with_keys: {identity!r} must be one whole number in each example"
            )
        numbers = torch.stack(identities).to(key.device)
    new_keys = fold_in(key, numbers).unbind()
    for example, new_key in zip(keyed, new_keys, strict=True):
        example[name] = new_key
    return keyed


def draw_like(x: Tensor, key: KeyOrPackedKeys, convert: WordFn) -> Tensor:
    """Draws 32 bits, a word, for each element of x, and returns ``convert(word)`` in x's shape.

    Keys and coordinates are those of ``dropout``. Raises ValueError if the keys' shape does not
    begin the shape of x; with ``PackedKeys``, unless ``dropout`` takes this shape. ``convert`` must
    work on each element alone.

    >>> draw_like(torch.ones(2), key(0), lambda word: word).equal(bits(key(0), (2,)))
    True
    """
    if isinstance(key, PackedKeys):
        _check_keys(key.keys)
        return _draw_for_tokens(key, x.shape, convert)
    _check_keys(key)
    if x.shape[: key.ndim] != key.shape:
        raise ValueError(
            f"keys of shape {tuple(key.shape)} for {tree.format_leaf(x)}: its first "
            "dimensions must be "
            "those of the keys, one key for each example"
        )
    return _draw(key, x.shape[key.ndim :], convert)


def _draw(key: Tensor, shape: Sequence[int], convert: WordFn) -> Tensor:
    """Draws a word for each element, and returns ``convert(word)``: ``(*key.shape, *shape)``.

    The counters of an element are its coordinates in ``shape``; that of the last dimension counts
    blocks of four elements. Of more than four dimensions, all but the last four are folded into the
    key. Raises TypeError as ``_check_keys``, and for a shape that is a number.
    """
    _check_keys(key)
    if isinstance(shape, int):
        raise TypeError(f"{shape=} must be a sequence of sizes, such as ({shape},)")
    if not shape:
        words = philox(key, (0, 0, 0, 0))
        return convert(words[0])
    # There are four counters, so further dimensions are folded into the key.
    while len(shape) > 4:
        numbers = torch.arange(shape[0], device=key.device)
        key = _make_key(key[..., None], numbers, _DIMENSION)
        shape = shape[1:]
    last_dim = len(shape) - 1
    coordinates = []
    for dim in range(last_dim):
        indices = torch.arange(shape[dim], device=key.device)
        trailing = [1] * (last_dim - dim)
        coordinates.append(indices.view(-1, *trailing))
    keys = key.view(*key.shape, *[1] * len(shape))
    return _draw_by_fours(keys, coordinates, shape[last_dim], convert)


def _draw_by_fours(
    key: Tensor,
    coordinates: Sequence[Tensor],
    last_size: int,
    convert: WordFn,
) -> Tensor:
    """Draws ``last_size`` elements along the last dimension, where key and coordinates have size 1.

    The counter of that dimension counts blocks of four elements: ``philox`` makes four words from
    one set of counters. Words beyond ``last_size`` are dropped. Returns ``convert(word)`` of the
    others.
    """
    num_fours = (last_size + 3) // 4
    fours = torch.arange(num_fours, device=key.device)
    words = philox(key, _to_counters([*coordinates, fours]))
    stacked = torch.stack([convert(word) for word in words], -1)
    return stacked.flatten(-2)[..., :last_size]


def _draw_for_tokens(
    token_keys: PackedKeys, shape: Sequence[int], convert: WordFn
) -> Tensor:
    """Draws ``convert(word)`` for tokens, each as if its example stood alone, in this shape.

    A token's coordinate is its position in its example; features and heads count as in ``bits``.
    Raises ValueError unless the shape is one that ``dropout`` takes with ``PackedKeys``.
    """
    keys = token_keys.keys
    positions = token_keys.positions
    without_heads = (*shape[:-3], *shape[-2:])
    if tuple(shape[:-1]) == keys.shape:  # (rows, length, features)
        keys = keys[..., None]
        coordinates = [positions[..., None]]
        return _draw_by_fours(keys, coordinates, shape[-1], convert)
    if tuple(shape) == keys.shape:
        coordinates = []
        last = positions
    elif without_heads == (*keys.shape, keys.shape[-1]):  # attention weights
        heads = torch.arange(shape[-3], device=keys.device)
        queries = positions[..., None, :, None]
        coordinates = [heads.view(-1, 1, 1), queries]
        last = positions[..., None, None, :]
        keys = keys[..., None, :, None]
    else:
        raise ValueError(
            f"token keys of shape {tuple(keys.shape)} for a tensor of shape {tuple(shape)}: its "
            "dimensions must be (rows, length, features), (rows, heads, length, length) or "
            "(rows, length)"
        )
    # The last coordinate counts by fours, and its two lowest bits select the word.
    words = philox(keys, _to_counters([*coordinates, last >> 2]))
    first, second, third, fourth = [convert(word) for word in words]
    is_odd = (last & 1) == 1
    is_upper = (last & 2) == 2
    lower_pair = torch.where(is_odd, second, first)
    upper_pair = torch.where(is_odd, fourth, third)
    return torch.where(is_upper, upper_pair, lower_pair)


def _to_counters(coordinates: Sequence[Tensor]) -> list[_Word]:
    """Returns coordinates as four counters: the last coordinate first, and 0 for missing ones."""
    missing = [0] * (4 - len(coordinates))
    return [*coordinates[::-1], *missing]


# Philox's multipliers less 2³², so that products with a word of 32 bits fit into int64.
_FACTORS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(key: _Word, counters: Sequence[_Word]) -> _Words:
    """Computes Philox4x32-10: four words of 32 bits, from a key of 64 bits and four counters.

    Key and counters are ints or int64 tensors, and broadcast. Counters have 32 bits.

    >>> [hex(word) for word in philox(0, (0, 0, 0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    first, second, third, fourth = counters
    low = key & _LOW
    high = key >> 32
    for i in range(10):
        # Only words of 32 bits are multiplied; higher bits are cut off in time. Otherwise torch's
        # compiler multiplies a result of arange in 32 bits, too (pytorch#175966).
        first = first & _LOW
        third = third & _LOW
        first_product = first * _FACTORS[0]
        third_product = third * _FACTORS[1]
        # Since factors are less 2³², the upper half of a product lacks the word once.
        second = ((third_product >> 32) + third) ^ second ^ (low + i * _KEY_STEPS[0])
        fourth = ((first_product >> 32) + first) ^ fourth ^ (high + i * _KEY_STEPS[1])
        # The words trade places. No other name keeps one alive: draws are large.
        first = second
        second = third_product
        third = fourth
        fourth = first_product
    return first & _LOW, second & _LOW, third & _LOW, fourth & _LOW


def _make_key(key: Tensor, number: int | Tensor, purpose: int) -> Tensor:
    """Makes a key from a key, a whole number of 64 bits and the purpose.

    The purpose is ``_FOLD``, ``_SPLIT`` or ``_DIMENSION``, and becomes the third counter. So
    different purposes have different counters, and no draw has any of these. Keys and numbers
    broadcast.
    """
    _check_keys(key)
    if isinstance(number, Tensor):
        number = number.to(torch.int64)
    low_number = number & _LOW
    high_number = (number >> 32) & _LOW
    low, high, _, _ = philox(key, (low_number, high_number, purpose, _NEW_KEY))
    new_key: Tensor = low | (high << 32)
    return new_key


def below_probability(p: float) -> Callable[[Tensor], Tensor]:
    """Returns a function that is True for words below p · 2³², so with probability p.

    The limit is rounded to a whole number. Raises ValueError unless p is from 0 to 1.

    >>> below_probability(0.5)(torch.tensor([2**31 - 1, 2**31]))
    tensor([ True, False])
    """
    if not 0 <= p <= 1:
        raise ValueError(f"{p=} must be a probability, from 0 to 1")
    limit = round(p * 2**32)
    return lambda word: word < limit


def _check_one_key(key: Tensor) -> None:
    """Raises as ``_check_keys``, and ``ValueError`` for a key with dimensions."""
    _check_keys(key)
    if key.ndim:
        raise ValueError(
            f"with_keys takes one key for all examples, got keys of shape {tuple(key.shape)}: "
            "pass one of them, or ps.random.fold_in(key, number)"
        )


def _check_keys(key: Any) -> None:
    """Raises TypeError unless keys are a tensor of dtype int64."""
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        raise TypeError(
            f"{tree.format_leaf(key)} is no key: keys are tensors of dtype int64, as "
            "ps.random.key(seed) "
            "makes them"
        )
