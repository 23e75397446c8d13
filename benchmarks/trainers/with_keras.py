"""Keras 3 on torch: ``gradient_accumulation_steps`` of its optimizers, in ``Model.fit``."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.trainers.column import Column, bigram, of_labels
from purestep.testing.problem import Problem
from purestep.testing.trainer import Group, Observation


class Keras:
    """The bigram model in layers of Keras, which computes in float32 unless told otherwise."""

    capabilities = of_labels(torch.float32)

    def __init__(self) -> None:
        # Making layers draws from Python's global generator, which is not the training's doing.
        self._make(*bigram().embedding.weight.shape)

    def _make(self, size: int, width: int) -> None:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import keras

        self.embedding = keras.layers.Embedding(size, width)
        self.head = keras.layers.Dense(size, use_bias=False)
        inputs = keras.Input((None,), dtype="int64")
        self.model = keras.Sequential([inputs, self.embedding, self.head])

    def start(self, problem: Problem, ranks: int) -> None:
        """At the problem's own parameters."""
        self.problem, self.optimizer = problem, None
        params = {name: p.numpy() for name, p in problem.params().items()}
        if self.embedding.get_weights()[0].shape != params["embedding.weight"].shape:
            self._make(*params["embedding.weight"].shape)
        self.embedding.set_weights([params["embedding.weight"]])
        self.head.set_weights([params["head.weight"].T])

    def update(self, group: Group) -> None:
        """``fit`` for as many steps as are accumulated."""
        import keras

        (microbatches,) = group
        if not microbatches:
            return
        steps = len(microbatches)
        optimizer = keras.optimizers.SGD(
            self.problem.learning_rate,
            momentum=self.problem.momentum,
            gradient_accumulation_steps=steps if steps > 1 else None,
        )
        self.model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, ignore_class=-100
            ),
        )
        optimizer.build(self.model.trainable_variables)
        if self.optimizer is not None and self.problem.momentum:
            for new, old in zip(
                optimizer.momentums, self.optimizer.momentums, strict=True
            ):
                new.assign(old)
        self.optimizer = optimizer

        examples: Any = [
            (batch["input_ids"], batch["labels"]) for batch in microbatches
        ]
        data: Any = DataLoader(examples, batch_size=None, generator=torch.Generator())
        self.model.fit(data, epochs=1, verbose=0)

    def observe(self) -> Sequence[Observation]:
        """The parameters, as torch's."""
        (embedding,), (head,) = self.embedding.get_weights(), self.head.get_weights()
        params = {
            "embedding.weight": torch.tensor(embedding),
            "head.weight": torch.tensor(head.T),
        }
        return [Observation(params)]


AVERAGE = (
    "“they will be updated every `gradient_accumulation_steps` steps, using the average value of the gradients since the last "
    "update.”"
)
COLUMNS = [
    Column(
        "Keras",
        Keras,
        ("keras", "torch"),
        "the docstring of keras.optimizers.SGD",
        "“gradient_accumulation_steps: Int or `None`. If an int, model & optimizer variables will not be updated at every step; instead "
        "they will be updated every `gradient_accumulation_steps` steps, using the average value of the gradients since the last "
        "update. This is known as "
        '"gradient accumulation".” The loss is SparseCategoricalCrossentropy(ignore_class=-100).',
        gives="mean of means",
        promises=dict.fromkeys(("T1", "T4", "T14"), AVERAGE),
    ),
]
