"""All columns, in the table's order."""

from benchmarks.trainers import (
    with_accelerate,
    with_axolotl,
    with_composer,
    with_fastai,
    with_ignite,
    with_jax,
    with_keras,
    with_lightning,
    with_llamafactory,
    with_mlx,
    with_olmo,
    with_purestep,
    with_torch,
    with_torchopt,
    with_torchtitan,
    with_torchtune,
    with_transformers,
    with_trl,
    with_tunix,
)
from benchmarks.trainers.column import Column

PROJECTS: dict[str, list[Column]] = {
    "PyTorch": with_torch.COLUMNS,
    "Accelerate": with_accelerate.COLUMNS,
    "transformers": with_transformers.COLUMNS,
    "TRL": with_trl.COLUMNS,
    "LLaMA-Factory": with_llamafactory.COLUMNS,
    "axolotl": with_axolotl.COLUMNS,
    "OLMo-core": with_olmo.COLUMNS,
    "torchtitan": with_torchtitan.COLUMNS,
    "Lightning": with_lightning.COLUMNS,
    "Ignite": with_ignite.COLUMNS,
    "fastai": with_fastai.COLUMNS,
    "Composer": with_composer.COLUMNS,
    "Keras": with_keras.COLUMNS,
    "torchtune": with_torchtune.COLUMNS,
    "mlx-lm": with_mlx.COLUMNS,
    "TorchOpt": with_torchopt.COLUMNS,
    "optax": with_jax.COLUMNS,
    "tunix": with_tunix.COLUMNS,
    "purestep": with_purestep.COLUMNS,
}
"""The columns of each project."""
COLUMNS: list[Column] = [column for columns in PROJECTS.values() for column in columns]
