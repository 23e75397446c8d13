"""Sequences of microbatches: any container, and those that make them anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import purestep as ps
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, step_with, weight_fn


def test_microbatches_of_any_container_and_shape() -> None:
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    parts = ({key: value[:1] for key, value in MICROBATCH.items()}, MICROBATCH)
    state = SGD.init(PARAMS)
    assert torch.equal(step(PARAMS, state, parts)[0]["w"], step(PARAMS, state, list(parts))[0]["w"])


class Anew(Sequence[Any]):
    """Makes its microbatches whenever it is asked, with masks drawn anew, as for masked language models."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError
        mask = torch.randint(0, 2, (8,), generator=self.generator)
        return {"x": mask.float(), "y": torch.zeros(8), "mask": mask}


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_a_sequence_that_makes_its_microbatches_anew(normalize: Any) -> None:
    """Those that are counted are those that are computed: the loss of every counted token is w² = 1."""
    settings = {"normalize": normalize, "weight_fn": lambda m: m["mask"]}
    _, _, metrics = step_with(group=Anew(), **settings)
    assert metrics.loss == 1
    evaluate = ps.make_eval_step(loss_fn, weight_fn=settings["weight_fn"])
    assert evaluate(PARAMS, Anew()).loss == 1
