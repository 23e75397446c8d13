"""tunix's ``PeftTrainer`` in JAX, with ``gradient_accumulation_steps`` and its own default loss."""

import contextlib
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.trainers.column import Column, bigram
from benchmarks.trainers.with_jax import sgd
from benchmarks.trainers.with_olmo import logits_task
from purestep.testing.problem import Batch, Problem, Task, causal_lm
from purestep.testing.trainer import Capabilities, Group, Observation


def next_tokens() -> Task:
    """Returns next tokens of a bigram model in float32, the dtype of JAX by default."""
    return logits_task(causal_lm(bigram(torch.float32)))


def twin(params: dict[str, torch.Tensor]) -> Any:
    """Makes the bigram model as a module of flax, called as tunix calls its models."""
    from flax import nnx
    from jax import numpy as jnp

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.embedding = nnx.Param(jnp.asarray(params["embedding.weight"].numpy()))
            self.head = nnx.Param(jnp.asarray(params["head.weight"].numpy()))

        def __call__(
            self, tokens: Any, positions: Any, cache: Any, attention_mask: Any
        ) -> Any:
            return self.embedding[...][tokens] @ self.head[...].T, cache

    return Model()


def batch_of(batch: Batch) -> dict[str, Any]:
    """Returns a batch as tunix's data sets have it; ``input_mask`` says which tokens count."""
    from jax import numpy as jnp

    return {
        "input_tokens": jnp.asarray(batch["input_ids"].numpy()),
        "input_mask": jnp.asarray((batch["labels"] != -100).numpy()),
        "mask": jnp.asarray((batch["attention_mask"] > 0).numpy()),
    }


def model_input(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's inputs, as the ``input_fn`` of the quickstart does."""
    from tunix.sft import utils

    return {
        "input_tokens": batch["input_tokens"],
        "input_mask": batch["input_mask"],
        "positions": utils.build_positions_from_mask(batch["mask"]),
        "attention_mask": utils.make_causal_attn_mask(batch["mask"]),
    }


class Tunix:
    """Trains by tunix, with a new trainer for each update.

    The number of microbatches is in a trainer's configuration. Each goes on with the optimizer of
    the one before.
    """

    capabilities = Capabilities(weights="mask", dtype=torch.float32, task=next_tokens())
    settings = ("jax.disable_jit()", "compiled")

    def __init__(self) -> None:
        self._setting = self.settings[0]

    def select_setting(self, setting: str) -> None:
        """Selects whether JAX compiles the step. It does for this law alone.

        The shapes of each case are others, so compilation would take most of the time.
        """
        self._setting = setting

    def start(self, problem: Problem, ranks: int) -> None:
        """Begins at the problem's parameters."""
        self._problem = problem
        self._model = twin(problem.params())
        self._trainer = self._trainer_for(1)
        self._loss: float | None = None

    def _trainer_for(self, microbatches: int, folder: str | None = None) -> Any:
        from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

        config = TrainingConfig(
            eval_every_n_steps=1,
            gradient_accumulation_steps=microbatches,
            checkpoint_root_directory=folder,
        )
        trainer = PeftTrainer(self._model, sgd(self._problem), config)
        return trainer.with_gen_model_input_fn(model_input)

    def update(self, group: Group) -> None:
        """Calls ``train`` on a data set of the microbatches."""
        import jax
        from flax import nnx

        (microbatches,) = group
        if not microbatches:
            return
        trainer = self._trainer_for(len(microbatches))
        nnx.update(trainer.optimizer, nnx.state(self._trainer.optimizer))
        with jax.disable_jit(self._setting == self.settings[0]):
            trainer.train([batch_of(batch) for batch in microbatches])
        self._trainer = trainer
        self._loss = float(trainer.metrics_logger.get_metric("", "loss", "train"))

    def observe(self) -> Sequence[Observation]:
        """Returns the parameters as tensors of torch, and the loss that tunix has logged."""
        import numpy as np

        params = {
            "embedding.weight": self._model.embedding,
            "head.weight": self._model.head,
        }
        arrays = {name: np.array(p[...]) for name, p in params.items()}
        return [
            Observation(
                {name: torch.tensor(p) for name, p in arrays.items()}, loss=self._loss
            )
        ]

    def save(self) -> Any:
        """Saves a checkpoint by tunix, and returns its folder."""
        from tunix.sft.checkpoint_manager import CheckpointManager

        folder = tempfile.TemporaryDirectory()
        with contextlib.closing(CheckpointManager(folder.name)) as manager:
            manager.save(1, self._model, self._trainer.optimizer, force=True)
        return folder

    def load(self, saved: Any) -> None:
        """Makes a new trainer, which restores the latest checkpoint of the folder."""
        self._trainer = self._trainer_for(1, saved.name)
        self._trainer.checkpoint_manager.close()


ACCUMULATE = (
    "“gradient_accumulation_steps: Number of steps to accumulate gradients before performing a parameter update (simulates larger "
    "batch sizes).”"
)
COLUMNS = [
    Column(
        "tunix",
        Tunix,
        ("google-tunix", "flax", "optax", "jax"),
        "https://tunix.readthedocs.io/en/latest/launching.html, “Training Configuration”, and the quickstart",
        f"{ACCUMULATE} The loss is the default of PeftTrainer, and the input_fn that of the quickstart.",
        gives="mean of means",
        folder="tunix",
    ),
]
