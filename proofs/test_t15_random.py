"""T15, randomness. With dropout in attention and in residuals, T1 to T4 hold: noise is a function of the example.

    xᵢ keeps its element at coordinates c  ⟺  philox(keyᵢ, c) ≥ p      whatever else is in i's row, microbatch, rank or group

Exact with integers, where every rate is ½ and so every division is exact, for a loss written by hand and for a module as it comes; bounded
for torch's own layer of a transformer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import random
from support import models
from support.ranks import check_step, check_within_bound
from support.strategies import (
    Batch,
    Case,
    Chooser,
    StepCase,
    assert_same,
    builds,
    make_case,
    make_step_case,
)
from support.texts import RealStepCase, real_steps
from support.theorem import System, as_tests, theorem

Loss = Callable[[Any, Batch], Tensor]


def by_hand(params: Any, batch: Batch) -> Tensor:
    """Computes attention without a softmax, a residual and a layer, each dropped: polynomials and ReLU, so that nothing is rounded."""
    weight = params["hidden"]["weight"]
    x = batch["x"]
    first, second, third = [random.fold_in(batch["key"], n) for n in range(3)]
    scores = ((x @ weight) @ (x @ weight).mT).tril()
    attended = random.dropout(scores, 0.5, first) @ x
    x = x + random.dropout(attended, 0.5, second)
    bias = torch.stack(params["hidden"]["biases"]).sum(0)
    hidden = random.dropout(torch.relu(x @ weight + bias), 0.5, third)
    return (hidden @ params["out"][0] - batch["y"]).square()


class DropoutLayers(nn.Module):
    """The same as a module that knows of no keys; the last layer may be computed again in the backward pass."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64}
        weight = torch.zeros(models.FEATURES, models.HIDDEN, **options)
        self.weight = nn.Parameter(weight)
        biases = [torch.zeros(models.HIDDEN, **options) for _ in range(2)]
        self.biases = nn.ParameterList(biases)
        self.out = nn.Parameter(torch.zeros(models.HIDDEN, **options))
        self.residual = nn.Dropout(0.5)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Computes an output for each token."""
        scores = ((x @ self.weight) @ (x @ self.weight).mT).tril()
        attended = functional.dropout(scores, 0.5, self.training) @ x
        x = x + self.residual(attended)
        if not self.recomputes:
            return self.last(x)
        output: Tensor = checkpoint(self.last, x, use_reentrant=False)
        return output

    def last(self, x: Tensor) -> Tensor:
        """Runs the last layer: no call of a module, so a checkpoint of it has no module to recognise."""
        hidden = torch.relu(x @ self.weight + self.biases[0] + self.biases[1])
        return functional.dropout(hidden, 0.5, self.training) @ self.out


_, APPLY_LAYERS = ps.from_module(DropoutLayers(recomputes=False))
_, APPLY_CHECKPOINTED = ps.from_module(DropoutLayers(recomputes=True))


def by_module(params: Any, batch: Batch, apply: Any = APPLY_LAYERS) -> Tensor:
    """Computes the same by the module, its n-th dropout from ``fold_in(key, n)``."""
    first, second = params["hidden"]["biases"]
    module_params = {
        "weight": params["hidden"]["weight"],
        "biases.0": first,
        "biases.1": second,
        "out": params["out"][0],
    }
    output: Tensor = apply(module_params, batch["x"], key=batch["key"])
    return (output - batch["y"]).square()


by_checkpoints = partial(by_module, apply=APPLY_CHECKPOINTED)
"""Computes the same by the module that draws again in the backward pass."""
UNTRANSFORMED: dict[str, Any] = {
    "axes": ["one", "threads"],
    "grad_and_value": ps.grad_and_value,
}
"""Settings in which no transform surrounds a loss: torch's checkpoints need that."""
LOSSES: list[tuple[Loss, dict[str, Any]]] = [
    (by_hand, {}),
    (by_module, {}),
    (by_checkpoints, UNTRANSFORMED),
]
"""Losses, and the settings that they need."""


def keyed_case(choose: Chooser, **narrowed: Any) -> tuple[StepCase, Loss]:
    """Makes a step, and chooses a loss of it."""
    loss_fn, needed = choose.choice(LOSSES)
    options = {"dtypes": [torch.float64], **needed, **narrowed}
    return make_step_case(choose, keyed=True, **options), loss_fn


@theorem("T15", builds(keyed_case))
def keyed_dropout(system: System, drawn: tuple[StepCase, Loss]) -> None:
    """The state and the loss are those of the one big batch, to the bit, whatever the cut, ranks, order and padding."""
    (case, setup, groups), loss_fn = drawn
    check_step(system, setup, case, groups, loss_fn, by_hand)


class Documents(NamedTuple):
    """Rows that are documents, and how many tokens a row of several of them has."""

    case: Case
    row_tokens: int


def make_documents(choose: Chooser) -> Documents:
    """Makes documents with keys, and chooses a row's length, in which the longest fits."""
    case = make_case(choose, keyed=True)
    return Documents(case, choose.randint(case.batch["w"].shape[1], 12))


@theorem("T15", builds(make_documents))
def packing(system: System, drawn: Documents) -> None:
    """Each element that an example draws in a row of several is what it draws alone."""
    case, row_tokens = drawn
    batch = case.batch
    length = batch["w"].shape[1]
    documents = []
    for row in range(case.rows):
        documents.append({key: value[row] for key, value in batch.items()})
    packed = ps.pack_documents(documents, row_tokens=row_tokens, pad=0)
    segments = packed["segments"]
    keys = random.token_keys(packed["key"], segments, packed["positions"])
    num_rows = len(segments)
    ones = torch.ones(num_rows, 2, row_tokens, row_tokens, device=segments.device)

    features = random.dropout(packed["x"], 0.5, keys)
    pairs = random.dropout(ones, 0.5, keys)

    num_documents = 0
    for row in range(num_rows):
        for segment in range(1, int(segments[row].max()) + 1):
            is_document = segments[row] == segment
            key = packed["key"][row, segment - 1]
            (number,) = (batch["key"] == key).nonzero()[:, 0]
            alone = random.dropout(batch["x"][number], 0.5, key)
            assert_same(features[row][is_document], alone, "features")
            square = ones.new_ones(2, length, length)
            alone = random.dropout(square, 0.5, key)
            document_pairs = pairs[row][:, is_document][:, :, is_document]
            assert_same(document_pairs, alone, "pairs")
            num_documents += 1
    assert num_documents == case.rows


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
        """Computes logits of each next token."""
        x = self.embedding(tokens)
        length = tokens.shape[1]
        mask = x.new_full((length, length), float("-inf")).triu(1)
        logits: Tensor = self.head(self.layer(x, src_mask=mask, is_causal=True))
        return logits


START, APPLY = ps.from_module(Encoder())


def encoder_params(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draws normal numbers for all parameters."""
    params = {}
    for name, leaf in START.items():
        value = torch.randn(leaf.shape, generator=generator) / 8
        if "norm" in name:
            value = value + 1
        params[name] = value.to(dtype)
    return params


def encoder_loss(params: Any, batch: Batch) -> Tensor:
    """Computes the cross entropy of each next token."""
    logits = APPLY(params, batch["tokens"], key=batch["key"])
    return ps.losses.cross_entropy(logits, batch["labels"])


ENCODER_STEPS = real_steps(
    loss_fn=encoder_loss,
    make_params=encoder_params,
    keyed=True,
    dtypes=[torch.float64, torch.float32],
)


@theorem("T15", ENCODER_STEPS)
def encoder_within_bound(system: System, drawn: RealStepCase) -> None:
    """For torch's own encoder layer: the exact gradient, but for rounding."""
    # Of each of the four dropouts, a product, there and back; the head is a layer, and most have biases.
    roundings = 8 + 3 * models.WIDTH + 2 * 6
    check_within_bound(system, drawn, encoder_loss, extra_roundings=roundings)


globals().update(as_tests(globals()))
