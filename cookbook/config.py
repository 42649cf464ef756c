"""The border to OmegaConf: plain YAML comes in, typed once at start by the classes that ``_target_`` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cookbook import paths, typed
from cookbook.errors import ConfigError

if TYPE_CHECKING:
    from cookbook.types import AdamParams

# ${cookbook:data} in YAML is the folder `data` that ships with cookbook. Launchers that start new processes import this
# module through the job function, so the resolver is there too.
OmegaConf.register_new_resolver("cookbook", lambda kind: str(paths.packaged(kind)), replace=True)


def _lora_or_full(lora: float, full: float, *, _root_: Any) -> float:
    """``${lora_or_full:2e-4,2e-5}``: the first value if the run trains a LoRA adapter, the second if every parameter."""
    return lora if OmegaConf.select(_root_, "model.lora_rank", default=0, throw_on_missing=False) else full


OmegaConf.register_new_resolver("lora_or_full", _lora_or_full, replace=True)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, as ``torch.optim.AdamW``. ``grad_clip_norm`` is a global L2 norm; 0 does not clip."""

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lr < float("inf"):
            raise ConfigError(f"optim: lr must be >= 0 and finite, got {self.lr}")
        self.adam()  # it checks the other five, which have the same names there

    def adam(self, scale: float = 1.0) -> AdamParams:
        """What one step gets; ``scale`` is the schedule's factor on the learning rate."""
        from cookbook.types import AdamParams  # it brings numpy, which printing a configuration can do without

        return AdamParams(
            learning_rate=self.lr * scale,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )


def build(node: DictConfig | Mapping[str, Any] | None, path: str, cls: type | None = None) -> Any:
    """The typed object of one node: ``build(cfg.optim, "optim")``.

    Args:
        node: keys and values as composed; ``_target_`` names the class.
        path: where the node stands in the configuration, for messages.
        cls: the class when there is no ``_target_``; otherwise ``_target_`` must name a subclass of it.

    Raises:
        ConfigError: naming ``path.key``: an unknown, missing or wrongly typed value, a class that cannot be imported.
    """
    values = _plain(node, path)
    target = values.pop(typed.TARGET, None)
    if target is None:
        if cls is None:
            raise ConfigError(f"{path}: no {typed.TARGET}, the class these keys belong to; {_advice(path)}")
        return typed.construct(cls, values, path)
    found = typed.resolve_target(target, f"{path}.{typed.TARGET}")
    if cls is not None and not issubclass(found, cls):
        raise ConfigError(f"{path}.{typed.TARGET}: expected {cls.__name__} or a child of it, got {target!r}")
    return typed.construct(found, values, path)


def _plain(node: DictConfig | Mapping[str, Any] | None, path: str) -> dict[str, Any]:
    """The node as a dict of Python values, interpolations resolved."""
    if isinstance(node, DictConfig):
        try:
            node = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key or path}: {str(error).splitlines()[0]}") from error
    if not isinstance(node, Mapping):
        found = "nothing" if node is None else repr(node)
        raise ConfigError(f"{path}: expected keys and values, got {found}; {_advice(path)}")
    return {str(key): value for key, value in node.items()}


def _advice(path: str) -> str:
    return f"choose a file of conf/{path.partition('.')[0]}/"
