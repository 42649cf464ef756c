"""Typed objects from nodes of OmegaConf, built once at start by the classes that ``_target_`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cookbook.config import typed
from cookbook.errors import ConfigError
from cookbook.utils import paths

# ${cookbook:data} in YAML is the folder `data` that ships with cookbook. Launchers that start new processes import this
# module through the job function, so the resolver is there too.
OmegaConf.register_new_resolver("cookbook", lambda kind: str(paths.packaged(kind)), replace=True)


def _lora_or_full(lora: float, full: float, *, _root_: DictConfig) -> float:
    """``${lora_or_full:2e-4,2e-5}``: the first value if the run trains a LoRA adapter, the second if every parameter."""
    rank = OmegaConf.select(_root_, "model.lora_rank", default=0, throw_on_missing=False)
    name = OmegaConf.select(_root_, "model.name", default=None, throw_on_missing=False)
    # Training continues an adapter that the model's folder holds.
    return lora if rank or (name is not None and paths.holds_adapter(str(name))) else full


OmegaConf.register_new_resolver("lora_or_full", _lora_or_full, replace=True)


def build(node: DictConfig | Mapping[str, object] | None, path: str, cls: type | None = None) -> Any:
    """Return the typed object of one node: ``build(cfg.optim, "optim")``.

    Args:
        node: the composed keys and values; ``_target_`` names the class.
        path: path of the node in the configuration, for messages.
        cls: class of a node without ``_target_``; otherwise ``_target_`` must name a subclass of it.

    Raises:
        ConfigError: naming ``path.key``: an unknown, missing or wrongly typed value, a class that cannot be imported.
    """
    values = plain_node(node, path)
    target = values.pop(typed.TARGET, None)
    chosen = cls if target is None else typed.resolve_target(target, f"{path}.{typed.TARGET}")
    if chosen is None:
        raise ConfigError(f"{path}: no {typed.TARGET}, the class these keys belong to; {_advice(path)}")
    if cls is not None and not issubclass(chosen, cls):
        raise ConfigError(f"{path}.{typed.TARGET}: expected {cls.__name__} or a child of it, got {target!r}")
    return typed.construct(chosen, values, path)


def plain_node(node: DictConfig | Mapping[str, object] | None, path: str) -> dict[str, object]:
    """Return the node as a dict of Python values, with interpolations resolved. Raises ConfigError: the node holds no keys."""
    if isinstance(node, DictConfig):
        try:
            node = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key or path}: {str(error).splitlines()[0]}") from error
    if not isinstance(node, Mapping):
        got = "nothing" if node is None else repr(node)
        raise ConfigError(f"{path}: expected keys and values, got {got}; {_advice(path)}")
    return {str(key): value for key, value in node.items()}


def _advice(path: str) -> str:
    return f"choose a file of conf/{path.partition('.')[0]}/"
