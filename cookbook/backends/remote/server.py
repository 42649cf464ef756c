"""A connection to a server: what it is asked once, and what runs, samplers and checkpoints are made with."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import importlib
import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cookbook.backends.remote import facts, wire
from cookbook.backends.remote.config import RemoteConfig
from cookbook.backends.remote.facts import Facts
from cookbook.backends.remote.messages import Explain
from cookbook.backends.remote.watch import Watch
from cookbook.backends.remote.wire import Wire
from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError, ConfigError, CookbookError
from cookbook.futures import Future
from cookbook.losses.base import Loss

log = logging.getLogger("cookbook")

ASK_S = 10.0  # a server that is there answers in less
CLOSE_S = 10.0  # what telling it that we leave may take; it finds out by itself, too
NO_KEY = "tml-none"  # the client insists on one, a server without keys does not look at it
ADAPTED = "all-linear"


class Server:
    """Raises ConfigError (the package ``tinker`` is missing) or BackendError (no answer, wrong key, another version)."""

    def __init__(self, config: RemoteConfig) -> None:
        self._tinker = package()
        self._all_logprobs = config.all_logprobs
        self.url = config.base_url.rstrip("/")
        self.wire = Wire(self._tinker)
        self.explained = Explain(self._tinker, self.url, config.api_key_env)
        self._http = importlib.import_module("httpx")  # the client package brings it
        self._key = os.environ.get(config.api_key_env)
        self._headers = {"X-API-Key": self._key} if self._key else {}
        self.facts = self._ask_facts()
        key = self._key or (NO_KEY if self.facts else None)
        self._service = self._tinker.ServiceClient(base_url=self.url, api_key=key)
        self.rest = self._told(lambda: self._tinker.RestClient(base_url=self.url, api_key=key))
        self._lengths: Mapping[str, int | None] = self._ask_models()
        self._watch = Watch(self.url, self._is_there, config.patience_s, self.explained.silent)

    # ---- what it can do ------------------------------------------------------------------------------------------

    def knows(self, loss: str) -> bool:
        """Whether it computes the loss by its name, as it is computed here."""
        return self.facts is not None and loss in self.facts.losses

    def options(self, loss: Loss) -> dict[str, float | str] | None:
        """A loss's options for a gradient there; None: the server knows the loss under no name, or takes no options."""
        if not self.knows(loss.name):
            return None
        own = {} if self._all_logprobs else {facts.ALL_LOGPROBS: "false"}
        return wire.options(loss.call_options()) | own

    @property
    def divides(self) -> bool:
        """Whether its optimizer step divides the gradient and drops that of a failed call; else this side sees to it."""
        return self.facts is not None

    def model_name(self, model: ModelConfig) -> str:
        """What the server calls the model: a folder has other places on other machines, and the same last name.

        Raises:
            BackendError: it has another one.
        """
        for name in (model.name, Path(model.name).name):
            if name in self._lengths:
                return name
        there = ", ".join(sorted(self._lengths, key=len)) or "none"
        raise BackendError(f"model.name: the server at {self.url} has not {model.name!r}, but {there}; choose one of these")

    def max_length(self, model: ModelConfig) -> int | None:
        """The longest sequence it takes, tokens; None when it does not say."""
        return self._lengths[self.model_name(model)]

    # ---- making things -------------------------------------------------------------------------------------------

    def new_run(self, model: ModelConfig, seed: int) -> Any:
        """A training client on the base model. Waits for it."""
        refuse_adapter(model)
        made = self._service.create_lora_training_client(
            self.model_name(model), rank=model.lora_rank, seed=seed, train_unembed=False
        )
        return self.follow(made).result()

    def run_of(self, path: str, *, optimizer: bool) -> Any:
        """A training client on saved weights. Waits for it."""
        service = self._service
        create = (
            service.create_training_client_from_state_with_optimizer if optimizer else service.create_training_client_from_state
        )
        return self.follow(create(path)).result()

    def sampler_of(self, *, path: str | None = None, base_model: str | None = None) -> Any:
        """A sampling client on saved weights, or on a base model. Waits for it."""
        return self.follow(self._service.create_sampling_client(model_path=path, base_model=base_model)).result()

    def origin(self, path: str) -> tuple[str, int]:
        """The base model of saved weights, and the rank of their adapter, 0 for full weights."""
        found = self.follow(self.rest.get_weights_info_by_tinker_path(path)).result()
        return found.base_model, found.lora_rank or 0

    def announce(self, sampler: Any, count: int) -> None:
        """The next ``count`` requests of a sampling client are to be computed together; only servers of ours listen.

        Results do not depend on it but in their last bits, so where it fails, what follows fails better.
        """
        if self.facts is None:
            return
        handle = json.loads(base64.urlsafe_b64decode(sampler.get_sampler_handle()))
        message = {"sampling_session_id": handle["sampling_session_id"], "count": count}
        with contextlib.suppress(self._http.HTTPError):
            self._http.post(f"{self.url}{facts.PATH}/batch", json=message, headers=self._headers, timeout=ASK_S)

    def delete(self, path: str) -> None:
        """A checkpoint that nobody refers to any more. One that is gone already, or cannot be deleted, is no error."""
        try:
            self.follow(self.rest.delete_checkpoint_from_tinker_path(path)).result()
        except (self._tinker.TinkerError, CookbookError) as error:
            log.info("%s: not deleted: %s", path, self.explained(error))

    # ---- waiting -------------------------------------------------------------------------------------------------

    def follow(self, asked: Any, kind: type[CookbookError] = BackendError) -> Future[Any]:
        """The result of a call of the client package, in our errors: of ``kind`` where the server refuses it."""
        followed = self._watch.follow(asked.future())
        explained: Future[Any] = Future()

        def tell(done: concurrent.futures.Future[Any]) -> None:
            error = done.exception()
            if error is None:
                explained.set_result(done.result())
            else:
                explained.set_exception(self.explained(error, kind))

        followed.add_done_callback(tell)
        return explained

    def give_up(self) -> None:
        """Fails everything under way: a call has failed, and nobody wants the rest."""
        self._watch.give_up(BackendError("the trainer is closed"))

    def close(self) -> None:
        """Tells the server that its memory for us can be freed."""
        self._watch.close()
        if not self._watch.gone:
            with contextlib.suppress(self._tinker.TinkerError, concurrent.futures.TimeoutError, RuntimeError, OSError):
                self._service.close("success").result(timeout=CLOSE_S)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _ask_facts(self) -> Facts | None:
        """None: it is no server of ours.

        Raises:
            BackendError: nobody answers, or it is of another version.
        """
        try:
            answer = self._http.get(f"{self.url}{facts.PATH}", headers=self._headers, timeout=ASK_S)
        except self._http.HTTPError as error:
            raise self.explained.silent(str(error) or type(error).__name__) from None
        if answer.status_code == self._http.codes.OK:
            return Facts.read(answer.json(), self.url)
        if answer.status_code == self._http.codes.UNAUTHORIZED and not self._key:
            raise self.explained.wrong_key()
        return None

    def capabilities(self) -> Any:
        """The server's models, in the words of the ``tinker`` package."""
        return self._told(lambda: self.rest.get_server_capabilities().result(timeout=6 * ASK_S))

    def _ask_models(self) -> Mapping[str, int | None]:
        found = self.capabilities()
        return {one.model_name: one.max_context_length for one in found.supported_models if one.model_name}

    def _is_there(self) -> bool:
        try:
            self._http.get(f"{self.url}/api/v1/healthz", timeout=ASK_S)
        except self._http.HTTPError:
            return False
        return True

    def _told(self, ask: Any) -> Any:
        try:
            return ask()
        except (self._tinker.TinkerError, ValueError, TimeoutError) as error:
            raise self.explained(error) from None


def refuse_adapter(model: ModelConfig) -> None:
    """Raises ConfigError: the adapter is on modules where a server puts none."""
    if model.lora_rank and model.lora_target_modules != ADAPTED:
        raise ConfigError(
            f"model.lora_target_modules: a server puts adapters on attention and MLP, got {model.lora_target_modules!r}; "
            f"set it to {ADAPTED}"
        )


def package() -> Any:
    """Raises ConfigError: it is not installed."""
    # Without this every error here, and the end of every run, would send traces of the user's program away and wait for it.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        package = importlib.import_module("tinker")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend=remote: the package {error.name!r} is not installed; install post-training-cookbook[tinker]"
        ) from None
    # Stop texts and stop ids side by side are more than its own type of them says.
    warnings.filterwarnings("ignore", message="Pydantic serializer warnings", category=UserWarning)
    if "TINKER_LOG" not in os.environ:  # what it says while it asks again is for those who look into it
        logging.getLogger("tinker").setLevel(logging.ERROR)
    return package
