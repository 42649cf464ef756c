"""Dropout probabilities of a network, set for every Hugging Face family.

Families keep their probabilities in three places: ``nn.Dropout`` modules, numbers of modules that are passed to attention
functions or to ``nn.functional.dropout`` (``attention_dropout``, ``hidden_dropout``), and, as Falcon does, only in the
configuration, which a layer reads in every pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from cookbook.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Randomness of training passes that is not a dropout of values: skipped layers, and noise on a router's input. A dropout of 0
# switches it off; other values leave it alone. PhiMoE's router_jitter_noise is a threshold in evaluation too, so it stays.
OTHER_RANDOMNESS = ("layerdrop", "layer_drop", "jitter_noise", "input_jitter_noise")
# Dropout of heads for other tasks.
OTHER_HEADS = ("classifier", "summary", "token_dropout", "positional_dropout")


class ConfigWithDropout:
    """View of a model's configuration with other dropout probabilities.

    Reads and writes of all other attributes go to the configuration itself, which checkpoints save unchanged.
    """

    def __init__(self, config: Any, values: Mapping[str, float]) -> None:
        self.__dict__["_config"] = config
        self.__dict__["_values"] = dict(values)

    def __getattr__(self, name: str) -> Any:
        # A copy or an unpickled object looks up names before it has a configuration.
        if name.startswith("__") or name in ("_config", "_values"):
            raise AttributeError(name)
        return self._values[name] if name in self._values else getattr(self._config, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._config, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigWithDropout:
        return ConfigWithDropout(copy.deepcopy(self._config, memo), self._values)


def set_dropout(network: PreTrainedModel, probability: float | None) -> None:
    """Set every dropout probability of a network without an adapter. None leaves the network unchanged.

    The configuration that a checkpoint saves keeps the model's own probabilities.

    Raises:
        ConfigError: the model has no dropout, and ``probability`` is above 0.
    """
    if probability is None:
        return
    from transformers import PreTrainedModel

    count = 0
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = float(probability)
            count += 1
        for name in _names(vars(module), probability):
            setattr(module, name, float(probability))
            count += 1
        config = getattr(module, "config", None)
        if config is None or isinstance(module, PreTrainedModel):
            continue
        if isinstance(config, ConfigWithDropout):
            config = config._config
        values = {name: float(probability) for name in _names(vars(config), probability)}
        if any(getattr(config, name) != value for name, value in values.items()):
            module.config = ConfigWithDropout(config, values)
            count += 1
    if probability > 0 and not count:
        raise ConfigError(f"model.dropout: {type(network).__name__} has no dropout, got {probability:g}; remove the key")


def _names(values: Mapping[str, object], probability: float) -> Iterator[str]:
    """Yield the names of probabilities among the attributes of a module or of a configuration."""
    for name, value in list(values.items()):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or name.startswith(OTHER_HEADS):
            continue
        if (name in OTHER_RANDOMNESS and probability == 0) or ("drop" in name and name not in OTHER_RANDOMNESS):
            yield name
