"""torchtitan's ``Trainer``, with a small Llama, on gloo: its ``train_step`` makes each update.

``Trainer.__init__`` runs as it is, from a ``Trainer.Config``. What it is given by hand:

- The device: torchtitan takes the CPU for the accelerator on import, and gets no statistics
  of its memory. The kernels of its expert parallelism, which need triton, are a mock.
- The meshes of the ranks, which are made once for each process. ``spmd_backend`` is
  "partial_dtensor": its default needs a ``fully_shard`` that is newer than torch 2.13.
- In ``OptimizersContainer``, torch's SGD with the numbers of the problem. Nothing is clipped, and
  all is in float32.
- The attention of ``scaled_dot_product_attention``: that of its configurations needs a GPU.
- No tokenizer and no data set: ``batch_generator`` is given the microbatches of an update.

What is set afterwards:

- The parameters, which were drawn.
- ``gradient_accumulation_steps`` before each update, and ``step``, which ``Trainer.train`` counts.
- SUM for the collectives of ``fully_shard``, as torchtitan does with symmetric memory: gloo has no
  PREMUL_SUM, which a divide factor of 1 takes otherwise.
- Garbage collection and torch's generator, which the constructor changes, as they were.
"""

import copyreg
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.trainers.column import Column, labelled
from purestep.testing.adapters import Loop, Processes
from purestep.testing.problem import Batch, Problem, Task
from purestep.testing.trainer import Capabilities

LENGTH = 64
"""Of the longest row."""


@cache
def titan() -> Any:
    """Imports ``torchtitan.trainer`` on a CPU, without kernels that need triton."""
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules.setdefault(kernels, mock.MagicMock())
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        from torchtitan import trainer
    from torchtitan.components import metrics

    statistics = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    monitor = SimpleNamespace(
        device_name="CPU",
        get_peak_stats=lambda: statistics,
        reset_peak_stats=lambda: None,
    )
    vars(metrics)["build_device_memory_monitor"] = lambda: monitor
    vars(trainer.utils)["get_peak_flops"] = lambda name: 1.0  # It asks lspci.
    from torchtitan.models.llama3 import Llama3Model

    copyreg.pickle(Llama3Model, taken_apart)
    gc.freeze()  # GarbageCollection collects in each constructor.
    return trainer


def numbers_of(model: Any) -> tuple[int, int, int]:
    """Returns what ``small`` needs for a model of the same shapes."""
    vocabulary, width = model.tok_embeddings.weight.shape
    return vocabulary, width, model.config.layers[0].attention.n_heads


def taken_apart(model: Any) -> Any:
    """Pickles a model as numbers: the process that loads it has to import torchtitan in the same way."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    return rebuilt, (numbers_of(model), params)


def rebuilt(numbers: tuple[int, int, int], params: dict[str, Tensor]) -> Any:
    """Makes the model that ``taken_apart`` was given."""
    model = small(*numbers)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params[name])
    return model


def config_of(vocabulary: int = 5, width: int = 4, heads: int = 2) -> Any:
    """Returns the configuration of a Llama of one layer, in the manner of its ``debugmodel``."""
    titan()
    from torchtitan.models import llama3
    from torchtitan.models.common import attention

    debug: Any = vars(llama3)
    attends = attention.ScaledDotProductAttention.Config()
    with mock.patch.object(llama3, "get_attention_config", return_value=attends):
        layers = debug["_build_llama3_layers"](
            n_layers=1,
            dim=width,
            n_heads=heads,
            hidden_dim=4,
            rope=llama3.ComplexRoPE.Config(dim=width // heads, max_seq_len=LENGTH),
            fuse_qkv=False,
            attn_backend="flex",
        )
    return llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=width,
            param_init=debug["_EMBEDDING_INIT"],
        ),
        norm=llama3.RMSNorm.Config(
            normalized_shape=width, param_init=debug["_NORM_INIT"]
        ),
        lm_head=llama3.Linear.Config(
            in_features=width,
            out_features=vocabulary,
            param_init=debug["_output_linear_init"](width),
        ),
        layers=layers,
    )


def small(vocabulary: int = 5, width: int = 4, heads: int = 2) -> Any:
    """Makes a small Llama of torchtitan's."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = config_of(vocabulary, width, heads).build()
        with torch.no_grad():
            model.init_weights(buffer_device=None)
    return model


def losses(model: Any, batch: Batch) -> Tensor:
    """Of a model that returns logits: its data sets move labels to the place that predicts them."""
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.mT, batch["labels"], reduction="none")


def titan_task(model: Any) -> Task:
    """A label for each token."""
    like: Any = SimpleNamespace(
        get_input_embeddings=lambda: model.tok_embeddings, parameters=model.parameters
    )
    return replace(labelled(like, losses=losses), model=model)


@cache
def dimensions(replicate: int, shard: int) -> Any:
    """Makes the meshes of a group, once for each process."""
    titan()
    from torchtitan.distributed import ParallelDims

    parallelism = parallelism_of(replicate, shard)
    return ParallelDims.from_config(parallelism, dist.get_world_size())


def parallelism_of(replicate: int, shard: int) -> Any:
    """Returns its configuration of data parallel ranks."""
    from torchtitan.config.configs import ParallelismConfig

    return ParallelismConfig(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        spmd_backend="partial_dtensor",
    )


def trainer_of(model: Any, problem: Problem, sharded: bool, **metrics: Any) -> Any:
    """Makes its ``Trainer``, at the parameters of a model."""
    trainer: Any = titan()
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        default_adamw,
    )
    from torchtitan.config.configs import TrainingConfig
    from torchtitan.models.llama3 import parallelize_llama
    from torchtitan.protocols.model_spec import ModelSpec

    ranks = dist.get_world_size()
    degrees = (1, ranks) if sharded else (ranks, 1)

    def optimizers(model_parts: Any) -> Any:
        adamw = default_adamw()
        adamw.implementation = "for-loop"
        container = OptimizersContainer(adamw, model_parts=model_parts)
        container.optimizers = [problem.optimizer(model_parts[0])]
        return container

    config = trainer.Trainer.Config(
        model_spec=ModelSpec(
            name="llama3",
            flavor="small",
            model=config_of(*numbers_of(model)),
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        loss=CrossEntropyLoss.Config(),
        optimizer=SimpleNamespace(build=optimizers),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=LENGTH,
            max_norm=float("inf"),
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=parallelism_of(*degrees),
        metrics=MetricsProcessor.Config(**metrics),
        checkpoint=CheckpointManager.Config(
            enable=False, initial_load_model_only=False
        ),
        activation_checkpoint=None,
        tokenizer=SimpleNamespace(build=lambda **more: None),
        dataloader=SimpleNamespace(build=lambda **more: None),
    )
    os.environ.setdefault("LOCAL_RANK", "0")
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(),
        mock.patch.object(
            trainer.Trainer, "init_distributed", return_value=dimensions(*degrees)
        ),
    ):
        warnings.simplefilter("ignore")  # Of random numbers of DTensors on a CPU.
        collects = gc.isenabled()
        made = trainer.Trainer(config)
        if collects:
            gc.enable()
    (parallel,) = made.model_parts
    for module in parallel.modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM, which a divide factor of 1 would take.
            module.set_force_sum_reduction_for_comms(True)
    started = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in parallel.named_parameters():
            full = started[name].detach()
            p.copy_(
                distribute_tensor(full, p.device_mesh, p.placements)
                if isinstance(p, DTensor)
                else full
            )
    return made


class Training:
    """A trainer of torchtitan's, and what it logs."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.logged: dict[str, Any] = {}
        trainer.metrics_processor.logger = self

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Keeps what a logger is given."""
        self.logged = metrics

    def named_parameters(self) -> Any:
        """Those of the model."""
        return self.trainer.model_parts[0].named_parameters()


def prepare(sharded: bool, module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """Makes a trainer that logs each step."""
    training = Training(trainer_of(module, problem, sharded, log_freq=1))
    return training, training.trainer.optimizers


def update(
    model: Training, optimizers: Any, microbatches: Sequence[Batch], problem: Problem
) -> dict[str, Any]:
    """Makes an update as ``Trainer.train`` does. All ranks have as many microbatches."""
    if not microbatches:
        return {}
    trainer = model.trainer
    data = [({"input": each["input_ids"]}, each["labels"]) for each in microbatches]
    trainer.gradient_accumulation_steps = len(data)
    trainer.step += 1
    trainer.train_step(trainer.batch_generator(data))
    return {
        "loss": model.logged["loss_metrics/global_avg_loss"],
        "grad_norm": model.logged["grad_norm"],
    }


def trains(sharded: bool, **how: Any) -> Processes:
    """Makes a trainer of processes."""
    capabilities = Capabilities(
        ranks=2,
        uneven_ranks=False,
        weights="mask",
        dtype=torch.float32,
        task=titan_task(small()),
    )
    return Processes(
        partial(Loop, update, partial(prepare, sharded)),
        capabilities,
        **{"timeout": 180.0, **how},
    )


PACKAGES = ("torchtitan", "spmd-types", "torch")
CONFIG = "the docstrings of torchtitan/config/configs.py"
BATCHES = (
    "“global_batch_size: Global batch size across data-parallel ranks and gradient accumulation steps.” It fixes "
    "gradient_accumulation_steps; here this is set before each update, to the number of its microbatches. log_freq is 1."
)
COLUMNS = [
    Column(
        "torchtitan",
        partial(trains, True),
        PACKAGES,
        CONFIG,
        f"{BATCHES}\n“data_parallel_shard_degree: When this value is greater than 1, weights will be sharded across "
        "`data_parallel_shard_degree` ranks.”",
        folder="torchtitan",
        # Its configuration gives all ranks as many microbatches.
        takes_uneven=False,
    ),
    Column(
        "torchtitan, DDP",
        partial(trains, False),
        PACKAGES,
        CONFIG,
        "“data_parallel_replicate_degree: When this value is greater than 1, weights will be replicated across "
        "`data_parallel_replicate_degree` ranks.”\nThe parallelism method used is DDP, by fully_shard on one shard.",
        folder="torchtitan",
        takes_uneven=False,
    ),
]
