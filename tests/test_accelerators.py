"""What an accelerator meets, as far as lazy tensors and groups of the host can show it."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import purestep as ps
from proofs.devices import Waits, device as lazy
from purestep import tree
from purestep.axis.mesh import LOST_CONNECTION
from purestep.objective import weighted_sum
from purestep.sharding.layout import reduce_axes, shards_over
from purestep.testing import ThreadAxis
from tests.held_by_ranks import group_of_one
from tests.memory import Operations

HOST = torch.device("cpu")


def squares(w: Tensor, x: Tensor) -> Tensor:
    return (w - x) ** 2


def test_ranks_as_threads_are_refused_on_a_device() -> None:
    """All of a device's backward passes run in one thread, where a rank would wait for itself."""
    axis, sgd = ThreadAxis(2), ps.optim.sgd(0.1)
    step = ps.make_update_step(squares, sgd, weight_fn=torch.ones_like, axis=axis)
    w = torch.zeros(1, device="cpu").to(lazy())
    with pytest.raises(
        ValueError, match=r"share|ThreadAxis\(2\) runs ranks as threads.*VmapAxis"
    ):
        axis.map(lambda _: step(w, sgd.init(w), [w]))([0, 1])


def test_aux_on_the_host_is_summed_over_a_device() -> None:
    """NCCL has no collectives for the host. The sum comes back to where the leaf was."""
    axis = ThreadAxis(2)
    axis.device = lazy()
    aux = [
        (torch.tensor(rank), torch.tensor(rank, device=HOST).to(lazy()))
        for rank in (1, 2)
    ]
    for host, device in axis.map(lambda aux: axis.apply_tree("psum", aux))(aux):
        assert (host.item(), device.item()) == (3, 3)
        assert (host.device.type, device.device.type) == ("cpu", "lazy")


def test_an_argument_that_a_backend_does_not_take_is_no_dead_rank() -> None:
    with group_of_one():
        axis = ps.MeshAxis(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "dp")
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            axis.apply("psum", torch.ones(1, dtype=torch.uint16))


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1",
        "Timed out waiting 1800000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "Broken pipe",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_what_backends_say_of_lost_ranks(text: str) -> None:
    assert LOST_CONNECTION.search(text)


def test_a_group_that_meets_on_the_host_beside_a_device() -> None:
    """As torch makes it by default: then no rank waits for a device to exchange a number."""
    for backend in ("gloo", "cpu:gloo,cuda:gloo"):
        store = vars(dist)["HashStore"]()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            axis = ps.MeshAxis(
                init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "dp"
            )
            assert axis.meets_on_host
            before = axis.meetings
            axis.apply("psum", torch.ones(1))
            assert before is not None
            assert axis.meetings == before + 1
        finally:
            dist.destroy_process_group()


class Compared(ps.LocalAxis):
    """An axis that counts how often its ranks are compared."""

    def __init__(self, *ranks: int) -> None:
        self.ranks, self.count = frozenset(ranks), 0

    @property
    def global_ranks(self) -> frozenset[int]:  # type: ignore[override]
        self.count += 1
        return self.ranks


@pytest.mark.parametrize("number", [1, 100])
def test_axes_are_compared_once_for_all_leaves(number: int) -> None:
    """Not once a leaf: of thousands of ranks that takes as long as a kernel."""
    whole, part = Compared(0, 1, 2, 3), Compared(4, 5)
    places = tree.shard_specs(
        tree.flatten([ps.Shard(torch.ones(1), part, (1,))] * number)[1]
    )
    assert len(places) == number
    assert shards_over(places, whole) == {}
    assert reduce_axes(places, whole) == [whole] * number
    assert (whole.count, part.count) == (2, 4)


def test_the_losses_are_masked_once_where_the_host_cannot_look() -> None:
    terms = [torch.tensor([1.0, torch.nan], device=HOST).to(lazy())]
    cotangents = [torch.tensor([0.5, 0.0], device=HOST).to(lazy())]
    with Waits() as waits, Operations() as operations:
        total = weighted_sum(terms, cotangents, constant=True)
    assert waits.seen == []
    assert (
        operations.names["aten.sum.default"] == operations.names["aten.mul.Tensor"] == 1
    )
    assert total.item() == 0.5


def test_a_wrong_label_is_not_silent_where_the_host_cannot_look() -> None:
    """It counted as a logit of 0. Its loss and gradients are NaN; others stay as they are."""
    hidden, weight = torch.ones(4, 3), torch.eye(5, 3)
    labels = torch.tensor([0, 5, -100, 4])

    def losses_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return ps.losses.linear_cross_entropy(hidden, weight.to(hidden.device), labels)

    right = losses_of(hidden, torch.tensor([0, 0, -100, 4]))
    leaf = hidden.clone().requires_grad_()
    losses = torch.compile(losses_of, backend="aot_eager")(leaf, labels)
    losses.sum().backward()
    assert leaf.grad is not None
    assert losses.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(losses[[0, 2, 3]], right[[0, 2, 3]])
    assert leaf.grad.isnan().all(-1).tolist() == [False, True, False, False]
    with pytest.raises(ValueError, match="a label is 5"):
        losses_of(hidden, labels)


def test_a_profile_names_the_parts_of_a_step() -> None:
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(squares, sgd, weight_fn=torch.ones_like)
    w = torch.zeros(3)
    with profile() as prof:
        step(w, sgd.init(w), [torch.ones(3)] * 2)
    counts = Counter({event.key: event.count for event in prof.key_averages()})
    names = {
        name: count for name, count in counts.items() if name.startswith("purestep.")
    }
    parts = {"purestep.count": 1, "purestep.reduce": 1, "purestep.optimizer": 1}
    assert names == {**parts, "purestep.microbatch": 2}
