"""All columns, in the table's order."""

from benchmarks.conformance import (
    with_accelerate,
    with_jax,
    with_lightning,
    with_purestep,
    with_torch,
    with_torchopt,
    with_torchtune,
    with_transformers,
)
from benchmarks.conformance.column import Column

COLUMNS: list[Column] = [
    *with_torch.COLUMNS,
    *with_accelerate.COLUMNS,
    *with_transformers.COLUMNS,
    *with_lightning.COLUMNS,
    *with_torchtune.COLUMNS,
    *with_torchopt.COLUMNS,
    *with_jax.COLUMNS,
    *with_purestep.COLUMNS,
]
