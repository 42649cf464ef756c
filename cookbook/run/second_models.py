"""Frozen models of a run beside the one in training: the teacher of a distillation, and preference models of rewards."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook import terminal
from cookbook.backends.client_factory import ClientBackend, ClientTrainer
from cookbook.backends.local import LocalConfig
from cookbook.backends.model_source import checkpoint_of, pointer_of
from cookbook.backends.remote.config import RemoteConfig
from cookbook.checkpoints import manifest
from cookbook.data import Renderer
from cookbook.engine.model import AUTO, ModelConfig, with_dtype
from cookbook.engine.shape import Shape, shape_of
from cookbook.errors import ConfigError, CookbookError
from cookbook.protocols import Backend, PlannedBackend, Sampler
from cookbook.run import folder as run_folder
from cookbook.run.settings import Settings
from cookbook.sampling.rewards import model_rewards

if TYPE_CHECKING:
    from cookbook.run.identity import Identity

log = logging.getLogger("cookbook")


@dataclass(frozen=True)
class SecondModel:
    """A model beside the one in training: ``key`` names it in the configuration.

    ``url`` is the address of its server. None means the server of its run, else the server of the trainer, else this process.
    """

    key: str
    name: str
    url: str | None

    @property
    def url_key(self) -> str:
        """The key of the server's address."""
        return f"{self.key}_url" if self.key == "recipe.teacher" else f"{self.key.rpartition('.')[0]}.url"


@dataclass(frozen=True)
class LoadedModel:
    """A loaded second model. ``digest`` of its weights: None if its server states none. ``is_of_text``: see the manifest."""

    trainer: ClientTrainer
    sampler: Sampler
    digest: str | None
    is_of_text: bool


def second_models(typed: Settings) -> list[SecondModel]:
    """Return the teacher and the preference models of a run."""
    teacher = []
    if typed.has_teacher and typed.recipe.teacher is not None:
        teacher.append(SecondModel("recipe.teacher", typed.recipe.teacher, typed.recipe.teacher_url))
    return teacher + [
        SecondModel(f"{key}.model", reward.model, reward.url) for key, reward in model_rewards(typed.reward).items()
    ]


def shapes(typed: Settings) -> dict[str, Shape]:
    """Return the shapes of the second models that are loaded in this process, by key; none that would be downloaded first.

    Raises:
        ConfigError: a model is missing, or is not a model.
    """
    shape_by_key = {}
    for model in second_models(typed):
        if is_here(model, typed.backend):
            with _named(model):
                shape_by_key[model.key] = shape_of(with_dtype(ModelConfig(run_folder.sampling_target(model.name), dtype=AUTO)))
    return {key: shape for key, shape in shape_by_key.items() if shape is not None}


def is_here(model: SecondModel, backend: Backend) -> bool:
    """Whether a second model is loaded in this process."""
    if model.url is not None or pointer_of(model.name) is not None:
        return False
    return isinstance(backend, PlannedBackend) or (isinstance(backend, RemoteConfig) and checkpoint_of(model.name) is not None)


def load(model: SecondModel, backend: Backend, folder: Path, stack: contextlib.ExitStack) -> LoadedModel:
    """Load a model in this process, or find it on a server: at its ``url``, of its run, or that of the trainer.

    Raises:
        CookbookError: the model cannot be loaded; the error names its key.
    """
    with terminal.doing(f"loading {model.key}"), _named(model):
        return _loaded(model, backend, folder, stack)


def _loaded(model: SecondModel, backend: Backend, folder: Path, stack: contextlib.ExitStack) -> LoadedModel:
    name = model.name
    checkpoint, pointer = checkpoint_of(name), pointer_of(name)
    if model.url is not None:
        # Not with the key of the server that trains.
        backend = RemoteConfig(model.url)
    elif pointer is not None and not (isinstance(backend, RemoteConfig) and backend.base_url == pointer.url):
        backend = RemoteConfig(pointer.url)
    elif pointer is None and checkpoint is not None and isinstance(backend, RemoteConfig):
        backend = LocalConfig()
    if isinstance(backend, LocalConfig) and _stored_dtype(name) != "float32":
        # The precision of the trained model, which needs float32 weights. Weights of bfloat16 are computed as under autocast.
        backend = replace(backend, autocast=None)
    if not isinstance(backend, ClientBackend):
        raise ConfigError(f"backend: {type(backend).__name__} cannot load a second model; set {model.url_key}")
    clients = backend.clients(folder)
    stack.callback(clients.close)
    is_of_text = checkpoint is not None and manifest.is_of_text(checkpoint)
    if not isinstance(backend, RemoteConfig):
        config = clients.model(run_folder.sampling_target(name), {"dtype": AUTO})
        trainer = clients.trainer(config, 0, set())
        stack.callback(trainer.close)
        return LoadedModel(trainer, clients.sampler(trainer, None), _digest(trainer, Path(config.name)), is_of_text)
    saved = pointer.path if pointer is not None else name if name.startswith("tinker://") else None
    trainer = clients.trainer(clients.model(name, {}) if saved is None else clients.saved_model(saved), 0, set())
    stack.callback(trainer.close)
    digest = trainer.digests().get("weights")
    if pointer is not None:
        # The server's digest is that of the base model.
        digest = f"{digest or ''}{hashlib.sha256(pointer.path.encode()).hexdigest()[:16]}"
    return LoadedModel(trainer, clients.sampler(trainer, saved), digest, is_of_text)


def _digest(trainer: ClientTrainer, folder: Path) -> str | None:
    digest = trainer.digests().get("weights")
    adapter = folder / "adapter_model.safetensors"
    # The digest of a model leaves adapters out.
    extra = hashlib.sha256(adapter.read_bytes()).hexdigest()[:16] if digest is not None and adapter.is_file() else ""
    return None if digest is None else digest + extra


def connect_rewards(typed: Settings, folder: Path, stack: contextlib.ExitStack, identity: Identity | None = None) -> None:
    """Load the preference models of the rewards, before the rewards are called.

    Raises:
        CookbookError: a model cannot be loaded, or the run to resume had other weights of it.
    """
    digests = []
    for place, (key, reward) in enumerate(model_rewards(typed.reward).items()):
        model = SecondModel(f"{key}.model", reward.model, reward.url)
        loaded = load(model, typed.backend, folder / f"reward-{place}", stack)
        tokenizer = loaded.trainer.tokenizer
        digests.append(str(loaded.digest))
        chat = bool(getattr(tokenizer, "chat_template", None)) and not loaded.is_of_text
        _warn_of_length(model, typed, loaded.trainer.max_length)
        reward.connect(loaded.sampler, Renderer(tokenizer, loaded.trainer.max_length), chat=chat)
    if digests and identity is not None:
        identity.measured("reward_models", " ".join(digests))


def _warn_of_length(model: SecondModel, typed: Settings, context: int | None) -> None:
    """Warn if two of the longest completions do not fit into the context of a preference model."""
    longest = typed.rollout.max_tokens
    if context is not None and typed.data_kind == "rollouts" and 2 * longest >= context:
        log.warning(
            f"{model.key}: two completions of rollout.max_tokens={longest:,} do not fit into its context of {context:,} "
            "tokens, and the run would stop at the first such pair; lower rollout.max_tokens"
        )


def _stored_dtype(name: str) -> str:
    """Return the dtype in which a model on this machine is loaded: that of its stored weights."""
    return with_dtype(ModelConfig(run_folder.sampling_target(name), dtype=AUTO)).dtype


@contextlib.contextmanager
def _named(model: SecondModel) -> Iterator[None]:
    """Name the keys of a second model in errors that name those of the model in training."""
    try:
        yield
    except CookbookError as error:
        text = str(error).replace("model.name", model.key)
        text = text if model.url is None else text.replace("backend.base_url", model.url_key)
        raise type(error)(text) from None
