"""Autocast of a device, which lets products compute in half precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype to which autocast casts operands of a device's products; None if it is off.

    It is off on devices that have none, such as "meta".

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast_dtype("cpu"), autocast_dtype("meta")
    (torch.bfloat16, None)
    """
    if device_type == "meta":  # A trace does not catch the error.
        return None
    try:
        is_enabled = torch.is_autocast_enabled(device_type)
    except RuntimeError:  # As for "lazy"; ``is_autocast_available`` raises there, too.
        return None
    return torch.get_autocast_dtype(device_type) if is_enabled else None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Returns a context in which products on a device have the dtype of their operands."""
    if autocast_dtype(device_type) is None:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
