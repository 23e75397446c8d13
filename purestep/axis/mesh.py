"""Real ranks: dimensions of a DeviceMesh under torchrun."""

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
    """The processes along one or several dimensions of a ``DeviceMesh``, such as those of
    ``torchrun``.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        update_step = ps.make_update_step(loss_fn, optimizer, axis=ps.MeshAxis(mesh, "dp"))

    Name the dimensions that split tokens, and no others. If sequences are split too, that is
    ``("dp", "cp")``. Beside tensor parallelism, whose ranks hold the same tokens, it is ``"dp"``
    alone. Several dimensions become one process group, so make the axis on every rank of the mesh,
    at the same place of the program.

    Start all ranks from the same parameters. purestep compares structures and settings, but not
    values. A rank may hold no microbatch, also with ``compile=True``. If ``torch.compile`` takes
    the whole step, each rank needs one at least, if only of weight 0.

    At the end call ``torch.distributed.barrier()``, then ``destroy_process_group()``. Threads of
    gloo still hold tensors when a collective returns. If Python ends before they let go, the
    process may abort (pytorch/pytorch#190489).

    Args:
        mesh: from ``torch.distributed.device_mesh.init_device_mesh``, with ``mesh_dim_names``.
        dims: the name of a dimension, or several names in the order of the mesh.
        bucket_bytes: the bytes of gradients in one collective. The first holds at most a megabyte.
            Smaller buckets leave earlier in the backward pass; larger ones make fewer calls.

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
        self.dims = (dims,) if isinstance(dims, str) else tuple(dims)
        names = mesh.mesh_dim_names or ()
        wanted = tuple(name for name in names if name in self.dims)
        if not wanted or wanted != self.dims:
            raise ValueError(
                f"MeshAxis(dims={self.dims}) must name one or several different dimensions of the "
                f'mesh, in its order: {names}; init_device_mesh takes mesh_dim_names=("dp",)'
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"this process is not in the mesh {mesh}: make the axis on its ranks"
            )
        part = mesh[self.dims]
        flat = part if len(self.dims) == 1 else torch_private.flattened(part)
        self._whole = mesh
        self._across: dict[tuple[str, ...], MeshAxis] = {}
        self.mesh: DeviceMesh = flat
        self._group: Any = flat.get_group()
        self._members = frozenset(dist.get_process_group_ranks(self._group))
        self.size, self._rank = flat.size(), flat.get_local_rank()
        self.device = current_device(mesh.device_type)
        self._where = MeshGroup(
            self._group.group_name, flat.size(), ", ".join(map(repr, self.dims))
        )

    @property
    def where(self) -> MeshGroup:
        """The process group."""
        return self._where

    @property
    def meetings(self) -> int | None:
        """How many collectives its group has begun; None where the backend does not count."""
        return torch_private.collectives_begun(self._group, self.device)

    @property
    def meets_on_host(self) -> bool:
        """Whether its group has a backend for the host: all but a group made with "nccl" alone."""
        return self.on_host or "cpu:" in dist.get_backend_config(self._group)

    @property
    def rank(self) -> int:
        """The number of this process, 0 to size - 1."""
        return self._rank

    @property
    def global_ranks(self) -> frozenset[int]:
        """The processes that it joins, by their ranks in the world."""
        return self._members

    def __eq__(self, other: object) -> bool:
        return (
            self._where == other._where
            if isinstance(other, MeshAxis)
            else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(self._where)

    def launch(self, x: Tensor, law: str = "psum") -> Wait:
        """Starts a law on contiguous memory, which holds a psum itself after the wait."""
        with explain_lost_ranks(self.where):
            if law == "psum":
                work, met = dist.all_reduce(x, group=self._group, async_op=True), x
            else:
                work, met = None, self.where.begin(law, x.view(-1))

        def wait() -> Tensor:
            with explain_lost_ranks(self.where):
                if work is None:
                    return torch_private.wait(met)
                work.wait()
                return met

        return wait

    def gather_object(self, value: Any) -> list[Any]:
        """All processes' values, in order of rank."""
        values: list[Any] = [None] * self.size
        with explain_lost_ranks(self.where):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def across(self, inner: ProcessAxis) -> MeshAxis:
        """The axis over those of its ranks that hold the same piece over ``inner``, its part."""
        dims = getattr(inner, "dims", ())
        others = tuple(dim for dim in self.dims if dim not in dims)
        if not others or len(others) + len(dims) != len(self.dims):
            raise ValueError(
                f"a tensor is sharded over {inner}, a part of {self} but not one or several of its "
                f"dimensions {self.dims}: make both axes of one mesh, by the names of its "
                "dimensions"
            )
        if others in self._across:
            return self._across[others]
        made = MeshAxis(self._whole, others, bucket_bytes=self.bucket_bytes)
        if not torch.compiler.is_dynamo_compiling():
            # torch 2.11's compiler keeps no process group that it has met in a trace.
            self._across[others] = made
        return made

    def __repr__(self) -> str:
        return str(self.where)


class MeshGroup(NamedTuple):
    """A process group, in words that a compiler can carry."""

    name: str
    size: int
    dims: str

    def begin(self, law: str, flat: Tensor) -> Tensor:
        """Starts a law on a vector, by the functional collectives, which compile."""
        if law == "psum":
            return torch_private.all_reduce(flat, "sum", self.name)
        if law == "all_gather":
            return torch_private.all_gather(flat, self.size, self.name)
        return torch_private.reduce_scatter(flat, "sum", self.size, self.name)

    def meet(self, law: str, x: Tensor) -> Tensor:
        """The law on a plain tensor."""
        if law == "pvary":
            return x.view_as(x)
        with explain_lost_ranks(self):
            met = torch_private.wait(self.begin(law, x.reshape(-1)))
        shapes = {
            "psum": x.shape,
            "all_gather": (self.size, *x.shape),
            "psum_scatter": x.shape[1:],
        }
        return met.view(shapes[law])

    def __str__(self) -> str:
        return f"MeshAxis({self.dims}, {self.size} rank{'s' if self.size > 1 else ''})"


def current_device(kind: str) -> torch.device:
    """The device of this type on which the process computes, with its index.

    >>> current_device("cpu")
    device(type='cpu')
    """
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


LOST_CONNECTION = re.compile(
    r"connection|timed? ?out|peer|broken pipe|socket|read error|closed|aborted|remote process",
    re.IGNORECASE,
)
"""What backends say of ranks that are gone or late."""


@contextmanager
def explain_lost_ranks(group: object) -> Iterator[None]:
    """A context in which a broken connection is an error that says what to look for."""
    try:
        yield
    except RuntimeError as error:
        what, *_ = str(error).split("\n")
        if not isinstance(error, dist.DistError) and not LOST_CONNECTION.search(what):
            raise  # an argument that the backend does not take
        raise RankError(
            f"a collective over {group} failed: most likely another rank has died, or is late by "
            "more than the group's timeout, and its own output says why. This process group is "
            "lost: end the process, so that others do not wait for it, and start again from the "
            f"last checkpoint, as torchrun --max-restarts does. The backend's message: {what}"
        ) from error
