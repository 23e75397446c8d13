"""Lists right trainers, each in another style: the kit has to accept them.

    python -m benchmarks.mistakes.right_trainers [SEED]

It prints how many cases each was asked, and what the kit rejects.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

import purestep as ps
from benchmarks.mistakes import right_frameworks, right_optimizers, right_styles

RIGHT: dict[str, Callable[[], Any]] = {
    "nano": right_frameworks.Nano,
    "ddp": right_frameworks.Ddp,
    "manual": right_styles.Manual,
    "divide_once": lambda: ps.testing.loop(right_styles.divide_once),
    "optax": right_frameworks.Optax,
    "transformers": right_frameworks.Transformers,
    "joined": right_styles.Joined,
    "keras_float32": right_frameworks.Keras,
    "adamw": right_styles.Adam,
    "clip": right_styles.Clip,
    "masked": right_styles.Masked,
    "lockstep": right_frameworks.Lockstep,
    "switch": right_styles.Switch,
    "evaluator": right_styles.Evaluator,
    "rate_by_tokens": right_optimizers.TokenSchedule,
    "rate_by_samples": right_optimizers.SampleSchedule,
    "warmup": right_optimizers.Warmup,
    "lamb": right_optimizers.Lamb,
    "lion": right_optimizers.Lion,
    "lion_with_dropout": right_optimizers.KeyedLion,
    "lion_of_means": right_optimizers.DividedLion,
    "adafactor": right_optimizers.Adafactor,
    "adamw_float32": right_optimizers.Float32,
    "lion_float32": right_optimizers.Float32Lion,
    "lamb_float32": right_optimizers.Float32Lamb,
    "adam_bfloat16": right_optimizers.Bfloat16,
    "clipped_bfloat16": right_optimizers.Bfloat16Sgd,
    "masters_bfloat16": right_optimizers.Masters,
    "normed_gradient": right_optimizers.NormedGradient,
    "averaged": right_optimizers.Averaged,
    "packed": right_optimizers.Packed,
    "rmsprop": right_optimizers.RmsProp,
}
"""The function that makes each trainer."""


def main(seed: int) -> None:
    """Prints how many cases each was asked, and those that the kit rejects."""
    torch.set_num_threads(1)
    for name, make in RIGHT.items():
        verdicts = ps.testing.run_laws(make(), seed=seed)
        print(
            f"{name:16} {sum(verdict.cases for verdict in verdicts)} cases", flush=True
        )
        for verdict in verdicts:
            if verdict.case is not None:
                print(f"{name}: {verdict}; {verdict.case.describe()}", flush=True)


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["0"])[0]))
