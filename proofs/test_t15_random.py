"""T15, randomness. With dropout in attention and in residuals, T1 to T4 hold: noise is a function of the example.

    xᵢ keeps its element at coordinates c  ⟺  philox(keyᵢ, c) ≥ p      whatever else is in i's row, microbatch, rank or group

Exact with integers, where every rate is ½ and so every division is exact; bounded for transformers. Each for a loss written by hand and for
a module as it comes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs import models
from proofs.ranks import ShareCase, check_ranks, share_cases
from proofs.strategies import (
    Batch,
    Case,
    How,
    RealCase,
    assert_same,
    assignments,
    capture,
    cases,
    cut,
    integer_batch,
    real_cases,
    step_of,
    weights_of,
)
from proofs.theorem import System, theorem
from proofs.worlds import on_threads
from proofs.writings import cuts
from purestep import tree
from purestep.testing.specification import spec

Loss = Callable[[Any, Batch], Tensor]
Arrangement = tuple[Case, list[list[int]], list[tuple[int, int]]]
"""A case; which rows each microbatch holds; how many ignored rows and columns it has beside them."""


def with_keys(system: System, case: Case) -> Case:
    """The case, whose rows have keys by their number in the data."""
    rows = system.random.with_keys([{}] * case.rows, system.random.key(case.seed), start=3)
    keys = torch.stack([row["key"] for row in rows])
    return replace(case, batch={**case.batch, "key": keys})


def integer_loss(random: Any) -> Loss:
    """Attention without a softmax, a residual and a layer, each dropped: polynomials and ReLU, so that nothing is rounded."""

    def loss(params: Any, batch: Batch) -> Tensor:
        weight, keys = params["hidden"]["weight"], batch["key"]
        x = batch["x"]
        pairs = ((x @ weight) @ (x @ weight).mT).tril()
        mixed = random.dropout(pairs, 0.5, random.fold_in(keys, 0)) @ x
        x = x + random.dropout(mixed, 0.5, random.fold_in(keys, 1))
        hidden = torch.relu(x @ weight + torch.stack(params["hidden"]["biases"]).sum(0))
        hidden = random.dropout(hidden, 0.5, random.fold_in(keys, 2))
        return (hidden @ params["out"][0] - batch["y"]).square()

    return loss


class Layers(nn.Module):
    """The same as a module that knows of no keys; the last layer may be computed again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        wide = torch.float64
        self.weight = nn.Parameter(torch.zeros(models.FEATURES, models.HIDDEN, dtype=wide))
        self.biases = nn.ParameterList([torch.zeros(models.HIDDEN, dtype=wide) for _ in range(2)])
        self.out = nn.Parameter(torch.zeros(models.HIDDEN, dtype=wide))
        self.residual, self.again = nn.Dropout(0.5), again

    def forward(self, x: Tensor) -> Tensor:
        """What comes out for each token."""
        pairs = ((x @ self.weight) @ (x @ self.weight).mT).tril()
        mixed = functional.dropout(pairs, 0.5, self.training) @ x
        x = x + self.residual(mixed)
        made: Tensor = checkpoint(self.last, x, use_reentrant=False) if self.again else self.last(x)
        return made

    def last(self, x: Tensor) -> Tensor:
        """No module's call, so that a checkpoint of it has nothing else to go by."""
        hidden = torch.relu(x @ self.weight + self.biases[0] + self.biases[1])
        return functional.dropout(hidden, 0.5, self.training) @ self.out


def module_loss(from_module: Any, again: bool = False) -> Loss:
    """The integer loss, by the module."""
    _, apply = from_module(Layers(again))

    def loss(params: Any, batch: Batch) -> Tensor:
        first, second = params["hidden"]["biases"]
        of_module = {
            "weight": params["hidden"]["weight"], "biases.0": first, "biases.1": second,
            "out": params["out"][0],
        }  # fmt: skip
        made: Tensor = apply(of_module, batch["x"], key=batch["key"])
        return (made - batch["y"]).square()

    return loss


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    """Rows in any order, cut anywhere, with ignored rows and columns put in."""
    case = draw(cases())
    order, parts = draw(st.permutations(range(case.rows))), draw(cuts(case.rows, 3))
    more = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in parts]
    return case, [[order[i] for i in rows] for rows in parts], more


def arranged(case: Case, parts: list[list[int]], more: list[tuple[int, int]]) -> list[Batch]:
    """The microbatches."""
    generator, group = case.generator, []
    for microbatch, (more_rows, more_columns) in zip(cut(case.batch, parts), more, strict=True):
        rows, length = microbatch["w"].shape
        ignored = microbatch["w"].new_zeros(rows + more_rows, length + more_columns)
        larger = integer_batch(ignored, generator)
        larger["key"] = torch.arange(rows + more_rows)
        for key, value in microbatch.items():
            larger[key][:rows][(slice(None), slice(length))[: value.ndim]] = value
        group.append(larger)
    return group


@theorem("T15", arrangements())
def cut_order_and_padding(system: System, drawn: Arrangement) -> None:
    """The state and the loss are those of the one big batch, to the bit: T1, T3 and T4."""
    case, parts, more = drawn
    case, loss_fn = with_keys(system, case), integer_loss(system.random)
    state, _, loss = spec(loss_fn, case.optimizer.update, case.params, case.opt_state, case.batch)
    step = system.make_update_step(loss_fn, case.optimizer, weight_fn=weights_of)
    *actual, metrics = step(case.params, case.opt_state, arranged(case, parts, more))
    assert_same(tuple(actual), state)
    assert_same(metrics.loss, loss, "loss")


@st.composite
def rank_arrangements(draw: st.DrawFn) -> tuple[Case, list[list[list[int]]]]:
    """Rows to ranks."""
    case = draw(cases())
    return case, draw(assignments(case.rows))


@theorem("T15", rank_arrangements())
def ranks(system: System, drawn: tuple[Case, list[list[list[int]]]]) -> None:
    """The same for any assignment to ranks: T2."""
    case, assignment = drawn
    case, loss_fn = with_keys(system, case), integer_loss(system.random)
    state, _, loss = spec(loss_fn, case.optimizer.update, case.params, case.opt_state, case.batch)
    groups, state_ = [cut(case.batch, rank) for rank in assignment], (case.params, case.opt_state)
    simulated = How("simulated", False, 40, {})
    *actual, metrics = step_of(system, simulated, state_, groups, loss_fn, case.optimizer)
    assert_same(tuple(actual), state)
    assert_same(metrics.loss, loss, "loss")


def keyed_case(system: System, drawn: ShareCase) -> tuple[Case, list[list[Batch]]]:
    """The case with keys, and what each rank holds of it."""
    case = with_keys(system, drawn[0])
    return case, [cut(case.batch, rank) for rank in drawn[1]]


@theorem("T15", share_cases())
def separate_ranks(system: System, drawn: ShareCase) -> None:
    """The same for ranks that run programs of their own, uneven and empty ones; by hand, and as a module that all of them call."""
    case, groups = keyed_case(system, drawn)
    for loss_fn in (integer_loss(system.random), module_loss(system.from_module)):
        check_ranks(on_threads, system, case, groups, *drawn[2:], loss_fn=loss_fn)


@theorem("T15", st.tuples(arrangements(), st.booleans()))
def module(system: System, drawn: tuple[Arrangement, bool]) -> None:
    """A module as it comes draws the same, its n-th dropout from ``fold_in(key, n)``; checkpoints draw it again."""
    (case, parts, more), again = drawn
    case, by_hand = with_keys(system, case), integer_loss(system.random)
    state, _, loss = spec(by_hand, case.optimizer.update, case.params, case.opt_state, case.batch)
    loss_fn = module_loss(system.from_module, again)
    step = system.make_update_step(loss_fn, case.optimizer, weight_fn=weights_of)
    *actual, metrics = step(case.params, case.opt_state, arranged(case, parts, more))
    assert_same(tuple(actual), state)
    assert_same(metrics.loss, loss, "loss")


@st.composite
def packed_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """Rows that are documents, and how many tokens a row of several of them holds."""
    case = draw(cases())
    return case, draw(st.integers(case.batch["w"].shape[1], 12))


@theorem("T15", packed_cases())
def packing(system: System, drawn: tuple[Case, int]) -> None:
    """Each element that an example draws in a row of several is what it draws alone."""
    case, row_tokens = drawn
    case = with_keys(system, case)
    documents = [{k: v[i] for k, v in case.batch.items()} for i in range(case.rows)]
    packed = ps.pack_documents(documents, row_tokens=row_tokens, pad=0)
    segments, positions = packed["segments"], packed["positions"]
    keys = system.random.token_keys(packed["key"], segments, positions)
    features = system.random.dropout(packed["x"], 0.5, keys)
    pairs = system.random.dropout(torch.ones(len(segments), 2, row_tokens, row_tokens), 0.5, keys)
    length, seen = case.batch["w"].shape[1], 0
    for row in range(len(segments)):
        for segment in range(1, int(segments[row].max()) + 1):
            where = segments[row] == segment
            (number,) = (case.batch["key"] == packed["key"][row, segment - 1]).nonzero()[:, 0]
            key, own = case.batch["key"][number], case.batch["x"][number]
            alone = system.random.dropout(torch.ones(2, length, length), 0.5, key)
            assert_same(features[row][where], system.random.dropout(own, 0.5, key), "features")
            assert_same(pairs[row][:, where][:, :, where], alone, "pairs")
            seen += 1
    assert seen == case.rows


@st.composite
def real_arrangements(draw: st.DrawFn, loss_fn: Any, make_params: Any) -> tuple[RealCase, list[Batch]]:  # fmt: skip
    """Real text with keys, its rows permuted and cut, each microbatch as long as it has to be."""
    dtypes = [torch.float64, torch.float32]
    case = draw(real_cases(dtypes, loss_fn=loss_fn, make_params=make_params, keyed=True))
    order, parts = draw(st.permutations(range(case.rows))), draw(cuts(case.rows))
    group = []
    for microbatch in cut(case.batch, [[order[i] for i in rows] for rows in parts]):
        length = int(microbatch["w"].sum(1).max()) if len(microbatch["w"]) else 0
        group.append({k: v if v.ndim == 1 else v[:, :length] for k, v in microbatch.items()})
    return case, [part for part in group if part["w"].numel()]


def transformer_loss(params: Any, batch: Batch) -> Tensor:
    """The transformer, with dropout in embedding, attention and both residuals."""

    def drop(x: Tensor, place: int) -> Tensor:
        return ps.random.dropout(x, 0.25, ps.random.fold_in(batch["key"], place))

    return models.transformer_loss(params, batch, drop)


@theorem("T15", real_arrangements(transformer_loss, models.transformer_params))
def transformer_within_bound(system: System, drawn: tuple[RealCase, list[Batch]]) -> None:
    """For the transformer: the exact gradient, but for rounding."""
    case, group = drawn
    step = system.make_update_step(transformer_loss, capture())
    _, grads, metrics = step(case.params, tree.zeros_like(case.params), group)
    # Of each of the four dropouts, a product, there and back.
    case.assert_within_bound(grads, extra_roundings=8)
    case.assert_loss_within_bound(metrics.loss)


class Encoder(nn.Module):
    """torch's own layer of a transformer, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, models.WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            models.WIDTH, models.HEADS, 4 * models.WIDTH, dropout=0.25, batch_first=True
        )
        self.head = nn.Linear(models.WIDTH, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next token."""
        x = self.embedding(tokens)
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        logits: Tensor = self.head(self.layer(x, src_mask=mask, is_causal=True))
        return logits


START, APPLY = ps.from_module(Encoder())


def encoder_params(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Normal numbers for all of them."""
    return {
        name: (torch.randn(leaf.shape, generator=generator) / 8 + ("norm" in name)).to(dtype)
        for name, leaf in START.items()
    }


def encoder_loss(params: Any, batch: Batch) -> Tensor:
    """Cross entropy of each next token."""
    logits = APPLY(params, batch["tokens"], key=batch["key"])
    return ps.losses.cross_entropy(logits, batch["labels"])


@theorem("T15", real_arrangements(encoder_loss, encoder_params))
def encoder_within_bound(system: System, drawn: tuple[RealCase, list[Batch]]) -> None:
    """For torch's own encoder layer: the exact gradient, but for rounding."""
    case, group = drawn
    step = system.make_update_step(encoder_loss, capture())
    _, grads, metrics = step(case.params, tree.zeros_like(case.params), group)
    # As above; the head is a layer of its own, and most layers have biases.
    case.assert_within_bound(grads, extra_roundings=8 + 3 * models.WIDTH + 2 * 6)
    case.assert_loss_within_bound(metrics.loss)


test_cut_order_and_padding = cut_order_and_padding.test()
test_ranks = ranks.test()
test_separate_ranks = separate_ranks.test()
test_module = module.test()
test_packing = packing.test()
test_transformer_within_bound = transformer_within_bound.test()
test_encoder_within_bound = encoder_within_bound.test()
