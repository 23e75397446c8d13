"""Steps on accelerators, as far as lazy tensors and process groups of the host can show them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import purestep as ps
from purestep import tree
from purestep.axis.mesh import LOST_CONNECTION
from purestep.objective import weighted_sum
from purestep.sharding.layout import reduce_axes, shards_over
from purestep.testing import ThreadAxis
from support.devices import Waits, get_device as lazy
from tests.memory import CountOperations
from tests.sharded_checkpoints import group_of_one

HOST = torch.device("cpu")


def squares(w: Tensor, x: Tensor) -> Tensor:
    return (w - x) ** 2


def axis_of_one() -> ps.MeshAxis:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    return ps.MeshAxis(mesh, "dp")


def to_lazy(tensor: Tensor) -> Tensor:
    """Moves a tensor of the host to the lazy device."""
    return tensor.to(lazy())


def test_ranks_as_threads_are_refused_on_a_device() -> None:
    """All of a device's backward passes run in one thread, where a rank would wait for itself."""
    axis = ThreadAxis(2)
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(squares, sgd, weight_fn=torch.ones_like, axis=axis)
    w = to_lazy(torch.zeros(1, device=HOST))
    run = axis.map(lambda _: step(w, sgd.init(w), [w]))

    message = r"share|ThreadAxis\(2\) runs ranks as threads.*VmapAxis"
    with pytest.raises(ValueError, match=message):
        run([0, 1])


def test_aux_on_the_host_is_summed_over_a_device() -> None:
    """NCCL has no collectives for the host. The sum comes back to where the leaf was."""
    axis = ThreadAxis(2)
    axis.device = lazy()
    aux = []
    for rank in (1, 2):
        leaf_on_device = to_lazy(torch.tensor(rank, device=HOST))
        aux.append((torch.tensor(rank), leaf_on_device))

    sums = axis.map(lambda aux: axis.apply_tree("psum", aux))(aux)

    for on_host, on_device in sums:
        assert on_host.item() == 3
        assert on_host.device.type == "cpu"
        assert on_device.item() == 3
        assert on_device.device.type == "lazy"


def test_a_dtype_that_a_backend_does_not_take_is_no_dead_rank() -> None:
    with group_of_one():
        axis = axis_of_one()
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
def test_messages_of_backends_about_lost_ranks_are_recognised(text: str) -> None:
    assert LOST_CONNECTION.search(text)


def test_a_group_that_meets_on_the_host_beside_a_device() -> None:
    """As torch makes it by default: then no rank waits for a device to exchange a number."""
    for backend in ("gloo", "cpu:gloo,cuda:gloo"):
        store = vars(dist)["HashStore"]()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            axis = axis_of_one()
            assert axis.has_host_backend
            meetings_before = axis.num_collectives
            axis.apply("psum", torch.ones(1))
            assert meetings_before is not None
            assert axis.num_collectives == meetings_before + 1
        finally:
            dist.destroy_process_group()


class Compared(ps.LocalAxis):
    """Counts how often the ranks of an axis are compared."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = frozenset(ranks)
        self.count = 0

    @property
    def global_ranks(self) -> frozenset[int]:  # type: ignore[override]
        self.count += 1
        return self.ranks


@pytest.mark.parametrize("num_leaves", [1, 100])
def test_axes_are_compared_once_for_all_leaves(num_leaves: int) -> None:
    """Not once a leaf: with thousands of ranks that takes as long as a kernel."""
    world = Compared(0, 1, 2, 3)
    others = Compared(4, 5)
    leaf = ps.Shard(torch.ones(1), others, (1,))
    structure = tree.flatten([leaf] * num_leaves)[1]
    places = tree.shard_specs(structure)

    assert len(places) == num_leaves
    assert shards_over(places, world) == {}
    assert reduce_axes(places, world) == [world] * num_leaves
    assert world.count == 2
    assert others.count == 4


def test_the_losses_are_masked_once_where_the_host_cannot_look() -> None:
    losses = to_lazy(torch.tensor([1.0, torch.nan], device=HOST))
    cotangents = to_lazy(torch.tensor([0.5, 0.0], device=HOST))

    with Waits() as waits, CountOperations() as operations:
        total = weighted_sum([losses], [cotangents], constant=True)

    assert waits.seen == []
    assert operations.names["aten.sum.default"] == 1
    assert operations.names["aten.mul.Tensor"] == 1
    assert total.item() == 0.5


def test_a_wrong_label_is_not_silent_where_the_host_cannot_look() -> None:
    """It counted as a logit of 0. Its loss and gradients are NaN; others stay as they are."""
    hidden = torch.ones(4, 3)
    weight = torch.eye(5, 3)
    labels = torch.tensor([0, 5, -100, 4])
    right_labels = torch.tensor([0, 0, -100, 4])

    def losses_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return ps.losses.linear_cross_entropy(hidden, weight.to(hidden.device), labels)

    leaf = hidden.clone().requires_grad_()
    losses = torch.compile(losses_of, backend="aot_eager")(leaf, labels)
    losses.sum().backward()

    assert losses.isnan().tolist() == [False, True, False, False]
    right = losses_of(hidden, right_labels)
    torch.testing.assert_close(losses[[0, 2, 3]], right[[0, 2, 3]])
    assert leaf.grad is not None
    assert leaf.grad.isnan().all(-1).tolist() == [False, True, False, False]
    with pytest.raises(ValueError, match="a label is 5"):
        losses_of(hidden, labels)


def test_a_profile_names_the_parts_of_a_step() -> None:
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(squares, sgd, weight_fn=torch.ones_like)
    w = torch.zeros(3)

    with profile() as prof:
        step(w, sgd.init(w), [torch.ones(3)] * 2)

    events = prof.key_averages()
    counts = {e.key: e.count for e in events if e.key.startswith("purestep.")}
    assert counts == {
        "purestep.count": 1,
        "purestep.microbatch": 2,
        "purestep.reduce": 1,
        "purestep.optimizer": 1,
    }
