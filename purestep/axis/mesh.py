"""``MeshAxis``: the processes along dimensions of a DeviceMesh, as under torchrun."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from purestep import torch_private
from purestep.axis.base import RankError
from purestep.axis.process import BUCKET_BYTES, ProcessAxis, Wait

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MeshAxis(ProcessAxis):
    """Spans processes along one or several dimensions of a ``DeviceMesh``, as under ``torchrun``.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        update_step = ps.make_update_step(loss_fn, optimizer, axis=ps.MeshAxis(mesh, "dp"))

    For the axis of a step, name the dimensions that split tokens, and no others. If sequences are
    split too, that is ``("dp", "cp")``. Beside tensor parallelism, whose ranks hold the same
    tokens, it is ``"dp"`` alone. Params may be sharded over other axes, such as ``"tp"``. Several
    dimensions become one process group, so make the axis on every rank of the mesh, at the same
    place of the program.

    Start all ranks from the same parameters. purestep compares structures and settings, but not
    values. A rank may hold no microbatch, also with ``compile=True``. If other ranks hold some,
    that raises ``ValueError`` with ``gather="loss"``, and for a loss that returns ``aux``. If
    ``torch.compile`` takes the whole step, each rank needs one at least, if only of weight 0.

    At the end call ``torch.distributed.barrier()``, then ``destroy_process_group()``. Threads of
    gloo still hold tensors when a collective returns. If Python ends before they let go, the
    process aborts (pytorch/pytorch#190489). On busy machines that happens after a barrier, too:
    ``os._exit(0)`` ends the program safely there.

    Raises ``ValueError`` for other names or another order of ``dims``, and for a ``bucket_bytes``
    that is no positive integer. It also does so in a process that is not in the mesh.

    Args:
        mesh: from ``torch.distributed.device_mesh.init_device_mesh``, with ``mesh_dim_names``.
        dims: the name of a dimension, or several names in the order of the mesh.
        bucket_bytes: the bytes of gradients in one collective. The first holds at most a megabyte.
            A larger leaf travels alone. Smaller buckets leave earlier in the backward pass;
            larger ones make fewer calls.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> axis = MeshAxis(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "dp")
    >>> axis, axis.apply("psum", torch.tensor([1.0]))
    (MeshAxis('dp', 1 rank), tensor([1.]))
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        dims: str | Sequence[str],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(bucket_bytes)
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(
                f"MeshAxis takes a DeviceMesh, got {type(mesh).__name__}: make one by "
                'init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))'
            )
        self.dims = (dims,) if isinstance(dims, str) else tuple(dims)
        names = mesh.mesh_dim_names or ()
        in_mesh_order = tuple(name for name in names if name in self.dims)
        if not self.dims or in_mesh_order != self.dims:
            raise ValueError(
                f"MeshAxis(dims={self.dims}) must name one or several different dimensions of the "
                f'mesh, in its order: {names}; init_device_mesh takes mesh_dim_names=("dp",)'
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"this process is not in the mesh {mesh}: make the axis on its ranks"
            )
        submesh = mesh[self.dims]
        if len(self.dims) > 1:
            submesh = torch_private.flatten_mesh(submesh)
        self.mesh: DeviceMesh = submesh
        self.size = submesh.size()
        self.device = current_device(mesh.device_type)
        self._full_mesh = mesh
        self._complements: dict[tuple[str, ...], MeshAxis] = {}
        self._group: Any = submesh.get_group()
        self._global_ranks = frozenset(dist.get_process_group_ranks(self._group))
        self._rank = submesh.get_local_rank()
        self._process_group = MeshGroup(
            name=self._group.group_name,
            size=self.size,
            dims=", ".join(repr(name) for name in self.dims),
        )

    @property
    def process_group(self) -> MeshGroup:
        """Returns the ``MeshGroup``, which names the process group and runs its collectives."""
        return self._process_group

    @property
    def num_collectives(self) -> int | None:
        """Counts the collectives that the process group's backend for the device has begun.

        Returns None if that does not count.
        """
        return torch_private.count_collectives(self._group, self.device)

    @property
    def has_host_backend(self) -> bool:
        """Returns whether the group has a backend for the host, as "cpu:gloo,cuda:nccl" has."""
        return self.on_host or "cpu:" in dist.get_backend_config(self._group)

    @property
    def rank(self) -> int:
        """Returns the index of this process, from 0 to size - 1."""
        return self._rank

    @property
    def global_ranks(self) -> frozenset[int]:
        """Returns the processes of the axis, this one included, by their ranks in the world."""
        return self._global_ranks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshAxis):
            return NotImplemented
        return self._process_group == other._process_group

    def __hash__(self) -> int:
        return hash(self._process_group)

    def launch(self, x: Tensor, op: str = "psum") -> Wait:
        """Launches a collective on contiguous memory, and returns a function that waits for it.

        ``op`` is "psum", "all_gather" or "psum_scatter". The function returns the result: ``x``
        itself, overwritten, after a psum, and a new vector after another op. That is the flat ``x``
        of all ranks, or this rank's part of their sum. ``launch`` and the function raise
        ``RankError`` if the connection is lost.
        """
        if op == "psum":
            return self._launch_psum(x)
        with explain_lost_ranks(self.process_group):
            result = self.process_group.begin(op, x.view(-1))

        def wait() -> Tensor:
            with explain_lost_ranks(self.process_group):
                return torch_private.wait(result)

        return wait

    def _launch_psum(self, x: Tensor) -> Wait:
        with explain_lost_ranks(self.process_group):
            work = dist.all_reduce(x, group=self._group, async_op=True)

        def wait() -> Tensor:
            with explain_lost_ranks(self.process_group):
                work.wait()
            return x

        return wait

    def gather_object(self, value: Any) -> list[Any]:
        """Gathers a picklable value of each process; each gets all of them, in order of rank.

        All processes of the axis call it. Raises ``RankError`` if the connection is lost.
        """
        values: list[Any] = [None] * self.size
        with explain_lost_ranks(self.process_group):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def complement(self, inner: ProcessAxis) -> MeshAxis:
        """Returns the axis over those dimensions of this axis that its subaxis ``inner`` lacks.

        All ranks call it together, since the first call may make a process group. Raises
        ``ValueError`` unless ``inner`` consists of some, but not all, of the dimensions. An
        ``inner`` of another mesh raises it too, if it has two or more ranks in common with the
        result.
        """
        dims = getattr(inner, "dims", ())
        others = tuple(dim for dim in self.dims if dim not in dims)
        if not dims or not others or len(others) + len(dims) != len(self.dims):
            raise ValueError(
                f"a tensor is sharded over {inner}, a part of {self} but not one or several of its "
                f"dimensions {self.dims}: make both axes of one mesh, by the names of its "
                "dimensions"
            )
        axis = self._complements.get(others)
        if axis is None:
            axis = MeshAxis(self._full_mesh, others, bucket_bytes=self.bucket_bytes)
        # Dimensions of another mesh may have the same names.
        if len(axis.global_ranks & inner.global_ranks) > 1:
            raise ValueError(
                f"a tensor is sharded over {inner}, which has ranks in common with {axis} of "
                f"{self}: make both axes of one mesh"
            )
        if not torch.compiler.is_dynamo_compiling():
            # torch 2.11's compiler keeps no process group that it has met in a trace.
            self._complements[others] = axis
        return axis

    def __repr__(self) -> str:
        return str(self.process_group)


class MeshGroup(NamedTuple):
    """Names a process group, as a constant that a compiler can hold, and runs its collectives."""

    name: str
    size: int
    dims: str

    def begin(self, op: str, flat: Tensor) -> Tensor:
        """Launches "psum", "all_gather" or "psum_scatter" on a vector.

        It leaves the vector as it is. Returns the result as a new vector, which
        ``torch_private.wait`` must wait for. These are torch's functional collectives, which
        compile.
        """
        if op == "psum":
            return torch_private.all_reduce(flat, "sum", self.name)
        if op == "all_gather":
            return torch_private.all_gather(flat, self.size, self.name)
        return torch_private.reduce_scatter(flat, "sum", self.size, self.name)

    def run(self, op: str, x: Tensor) -> Tensor:
        """Runs a collective on a plain tensor, waits, and returns the result as a new tensor.

        "psum" keeps the shape. "all_gather" puts a dimension over ranks first, and "psum_scatter"
        takes that dimension away. "pvary" runs nothing, and returns a view of ``x``. Raises
        ``RankError`` if the connection is lost.
        """
        if op == "pvary":
            return x.view_as(x)
        with explain_lost_ranks(self):
            result = torch_private.wait(self.begin(op, x.reshape(-1)))
        shapes = {
            "psum": x.shape,
            "all_gather": (self.size, *x.shape),
            "psum_scatter": x.shape[1:],
        }
        return result.view(shapes[op])

    def __str__(self) -> str:
        plural = "s" if self.size > 1 else ""
        return f"MeshAxis({self.dims}, {self.size} rank{plural})"


def current_device(device_type: str) -> torch.device:
    """Returns the device of this type on which the process computes; an accelerator with its index.

    >>> current_device("cpu")
    device(type='cpu')
    """
    if device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(device_type).current_device()
    return torch.device(device_type, index)


LOST_CONNECTION = re.compile(
    r"connection|timed? ?out|peer|broken pipe|socket|read error|closed|aborted|remote process",
    re.IGNORECASE,
)
"""Matches the errors of backends for ranks that are gone or late."""


@contextmanager
def explain_lost_ranks(group: object) -> Iterator[None]:
    """Turns a lost connection or a timeout in the block into a ``RankError`` with advice.

    The error names ``group``. Any ``DistError`` of torch counts as one, and any other
    ``RuntimeError`` whose first line matches ``LOST_CONNECTION``. Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        message, *_ = str(error).split("\n")
        if not isinstance(error, dist.DistError) and not LOST_CONNECTION.search(
            message
        ):
            raise  # The backend does not take an argument.
        raise RankError(
            f"a collective over {group} failed: most likely another rank has died, or is late by "
            "more than the group's timeout, and its own output says why. This process group is "
            "lost: end the process, so that others do not wait for it, and start again from the "
            f"last checkpoint, as torchrun --max-restarts does. The backend's message: {message}"
        ) from error
