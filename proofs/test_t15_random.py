"""T15, randomness. With dropout in attention and in residuals, T1 to T4 hold: noise is a function of the example.

    xᵢ keeps its element at coordinates c  ⟺  philox(keyᵢ, c) ≥ p      whatever else is in i's row, microbatch, rank or group

Exact with integers, where every rate is ½ and so every division is exact, for a loss written by hand and for a module as it comes; bounded
for torch's own layer of a transformer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs import models
from proofs.ranks import check_step, check_within_bound
from proofs.strategies import (
    Batch,
    Case,
    Chooser,
    Drawn,
    RealDrawn,
    assert_same,
    case_of,
    drawn,
    real_steps,
    step_case,
)
from proofs.theorem import System, as_tests, theorem

Loss = Callable[[Any, Batch], Tensor]
random = ps.random


def by_hand(params: Any, batch: Batch) -> Tensor:
    """Attention without a softmax, a residual and a layer, each dropped: polynomials and ReLU, so that nothing is rounded."""
    weight, x = params["hidden"]["weight"], batch["x"]
    first, second, third = (random.fold_in(batch["key"], place) for place in range(3))
    mixed = random.dropout(((x @ weight) @ (x @ weight).mT).tril(), 0.5, first) @ x
    x = x + random.dropout(mixed, 0.5, second)
    hidden = torch.relu(x @ weight + torch.stack(params["hidden"]["biases"]).sum(0))
    return (random.dropout(hidden, 0.5, third) @ params["out"][0] - batch["y"]).square()


class Layers(nn.Module):
    """The same as a module that knows of no keys; the last layer may be computed again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        wide = torch.float64
        self.weight = nn.Parameter(
            torch.zeros(models.FEATURES, models.HIDDEN, dtype=wide)
        )
        self.biases = nn.ParameterList(
            [torch.zeros(models.HIDDEN, dtype=wide) for _ in range(2)]
        )
        self.out = nn.Parameter(torch.zeros(models.HIDDEN, dtype=wide))
        self.residual, self.again = nn.Dropout(0.5), again

    def forward(self, x: Tensor) -> Tensor:
        """What comes out for each token."""
        pairs = ((x @ self.weight) @ (x @ self.weight).mT).tril()
        mixed = functional.dropout(pairs, 0.5, self.training) @ x
        x = x + self.residual(mixed)
        made: Tensor = (
            checkpoint(self.last, x, use_reentrant=False)
            if self.again
            else self.last(x)
        )
        return made

    def last(self, x: Tensor) -> Tensor:
        """No module's call, so that a checkpoint of it has nothing else to go by."""
        hidden = torch.relu(x @ self.weight + self.biases[0] + self.biases[1])
        return functional.dropout(hidden, 0.5, self.training) @ self.out


_, ONCE = ps.from_module(Layers(again=False))
_, AGAIN = ps.from_module(Layers(again=True))


def by_module(params: Any, batch: Batch, apply: Any = ONCE) -> Tensor:
    """The same by the module, its n-th dropout from ``fold_in(key, n)``."""
    first, second = params["hidden"]["biases"]
    of_module = {
        "weight": params["hidden"]["weight"], "biases.0": first, "biases.1": second,
        "out": params["out"][0],
    }  # fmt: skip
    made: Tensor = apply(of_module, batch["x"], key=batch["key"])
    return (made - batch["y"]).square()


OWN: dict[str, Any] = {"axes": ["one", "threads"], "grad_and_value": ps.grad_and_value}
"""torch's checkpoints stand under no transform."""
by_checkpoints = partial(by_module, apply=AGAIN)  # draws again in the backward pass
LOSSES: list[tuple[Loss, dict[str, Any]]] = [
    (by_hand, {}),
    (by_module, {}),
    (by_checkpoints, OWN),
]


def keyed_case(choose: Chooser, **how: Any) -> tuple[Drawn, Loss]:
    """A step, and a loss of it."""
    loss_fn, own = choose.choice(LOSSES)
    how = {"dtypes": [torch.float64], **own, **how}
    return step_case(choose, keyed=True, **how), loss_fn


@theorem("T15", drawn(keyed_case))
def keyed_dropout(system: System, drawn: tuple[Drawn, Loss]) -> None:
    """The state and the loss are those of the one big batch, to the bit, whatever the cut, ranks, order and padding."""
    (case, how, groups), loss_fn = drawn
    check_step(system, how, case, groups, loss_fn, by_hand)


def packed_case(choose: Chooser) -> tuple[Case, int]:
    """Rows that are documents, and how many tokens a row of several of them holds."""
    case = case_of(choose, keyed=True)
    return case, choose.randint(case.batch["w"].shape[1], 12)


@theorem("T15", drawn(packed_case))
def packing(system: System, drawn: tuple[Case, int]) -> None:
    """Each element that an example draws in a row of several is what it draws alone."""
    case, row_tokens = drawn
    documents = [{k: v[i] for k, v in case.batch.items()} for i in range(case.rows)]
    packed = ps.pack_documents(documents, row_tokens=row_tokens, pad=0)
    segments, positions = packed["segments"], packed["positions"]
    keys = random.token_keys(packed["key"], segments, positions)
    features = random.dropout(packed["x"], 0.5, keys)
    ones = torch.ones(len(segments), 2, row_tokens, row_tokens, device=segments.device)
    pairs = random.dropout(ones, 0.5, keys)
    length, seen = case.batch["w"].shape[1], 0
    for row in range(len(segments)):
        for segment in range(1, int(segments[row].max()) + 1):
            where = segments[row] == segment
            (number,) = (
                case.batch["key"] == packed["key"][row, segment - 1]
            ).nonzero()[:, 0]
            key, own = case.batch["key"][number], case.batch["x"][number]
            alone = random.dropout(ones.new_ones(2, length, length), 0.5, key)
            assert_same(features[row][where], random.dropout(own, 0.5, key), "features")
            assert_same(pairs[row][:, where][:, :, where], alone, "pairs")
            seen += 1
    assert seen == case.rows


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
        mask = torch.full(
            (length, length), float("-inf"), dtype=x.dtype, device=x.device
        )
        mask = mask.triu(1)
        logits: Tensor = self.head(self.layer(x, src_mask=mask, is_causal=True))
        return logits


START, APPLY = ps.from_module(Encoder())


def encoder_params(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Normal numbers for all of them."""
    return {
        name: (torch.randn(leaf.shape, generator=generator) / 8 + ("norm" in name)).to(
            dtype
        )
        for name, leaf in START.items()
    }


def encoder_loss(params: Any, batch: Batch) -> Tensor:
    """Cross entropy of each next token."""
    logits = APPLY(params, batch["tokens"], key=batch["key"])
    return ps.losses.cross_entropy(logits, batch["labels"])


DROPPED: dict[str, Any] = {"keyed": True, "dtypes": [torch.float64, torch.float32]}


@theorem("T15", real_steps(loss_fn=encoder_loss, make_params=encoder_params, **DROPPED))
def encoder_within_bound(system: System, drawn: RealDrawn) -> None:
    """For torch's own encoder layer: the exact gradient, but for rounding."""
    # Of each of the four dropouts, a product, there and back; the head is a layer, and most have biases.
    more = 8 + 3 * models.WIDTH + 2 * 6
    check_within_bound(system, drawn, encoder_loss, extra_roundings=more)


globals().update(as_tests(globals()))
