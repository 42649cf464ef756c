"""The meter as a hook of ``cookbook train``: ``+hook.meter={_target_:cookbook_hook.MeterHook,path:FILE}``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meter import Meter

from cookbook.run.hooks import Hook

# Metrics that show whether the setting trains.
LEARNING = {"reward": "reward/mean", "k3": "kl/sampler_trainer_k3", "clipped": "loss/clip_frac"}


class MeterHook(Hook):
    """Made with the configuration, before the model is loaded."""

    def __init__(self, path: str) -> None:
        self.meter = Meter(Path(path))

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        # The product counts model inputs, a token less than each row has.
        tokens = round(metrics["time/tokens_per_s"] * metrics["time/step_s"])
        self.meter.step(
            loss=metrics["loss"],
            inputs=tokens,
            trained=metrics["tokens/trained"],
            sampled=metrics.get("rollout/tokens", 0.0),
            **{name: metrics[key] for name, key in LEARNING.items() if key in metrics},
        )

    def on_end(self, run: object, state: str) -> None:
        if state == "finished":
            self.meter.write()
