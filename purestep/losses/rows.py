"""Regression: a loss for each row."""

from torch import Tensor

from purestep.losses.shapes import paired


def mse(predictions: Tensor, targets: Tensor, *, batch_dims: int = 1) -> Tensor:
    """Returns each unit's squared error, a mean over its elements, in float32 or wider.

        ℓᵢ = meanⱼ (xᵢⱼ − yᵢⱼ)²

    A step's loss is then torch's ``MSELoss`` over all rows, for any cut.

    Args:
        predictions: x.
        targets: y, of the same shape.
        batch_dims: how many leading dimensions number the units. 1: a unit is a row. 2: for (rows,
            time, features), each time step of each row has a loss and a weight. All dimensions:
            each element is a unit.

    >>> import torch
    >>> mse(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2))
    tensor([5., 0.])
    """
    predictions, targets = paired(predictions=predictions, targets=targets)
    if not 0 <= batch_dims <= predictions.ndim:
        raise ValueError(
            f"batch_dims={batch_dims} of predictions of shape "
            f"{tuple(predictions.shape)}: it counts "
            f"leading dimensions, so take one from 0 to {predictions.ndim}"
        )
    squares = (predictions - targets).square()
    return (
        squares.flatten(batch_dims).mean(-1) if batch_dims < squares.ndim else squares
    )
