"""All columns, in the table's order."""

from benchmarks.trainers import (
    with_accelerate,
    with_composer,
    with_fastai,
    with_ignite,
    with_jax,
    with_keras,
    with_lightning,
    with_mlx,
    with_purestep,
    with_torch,
    with_torchopt,
    with_torchtune,
    with_transformers,
    with_trl,
)
from benchmarks.trainers.column import Column

COLUMNS: list[Column] = [
    *with_torch.COLUMNS,
    *with_accelerate.COLUMNS,
    *with_transformers.COLUMNS,
    *with_trl.COLUMNS,
    *with_lightning.COLUMNS,
    *with_ignite.COLUMNS,
    *with_fastai.COLUMNS,
    *with_composer.COLUMNS,
    *with_keras.COLUMNS,
    *with_torchtune.COLUMNS,
    *with_mlx.COLUMNS,
    *with_torchopt.COLUMNS,
    *with_jax.COLUMNS,
    *with_purestep.COLUMNS,
]
