"""What a pure function leaves as it is: global state, and storages of its inputs."""

from typing import Any

import torch

from purestep import tree


def storages_in(value: Any) -> set[torch.UntypedStorage]:
    """Returns the storages of the leaves that have elements."""
    return {leaf.untyped_storage() for leaf in tree.leaves(value) if leaf.numel()}


def global_state() -> tuple[Any, ...]:
    """Returns torch's global modes and settings, which a step does not change; no generators."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
