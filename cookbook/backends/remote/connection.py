"""Connection to a server: the handshake, and the calls that create runs and samplers and delete checkpoints."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import importlib
import json
import logging
import os
import warnings
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cookbook.backends.remote import convert
from cookbook.backends.remote.convert import ErrorTranslator
from cookbook.backends.remote.watchdog import Watchdog
from cookbook.engine.model import ModelConfig, resolved
from cookbook.errors import BackendError, ConfigError, CookbookError
from cookbook.futures import Future
from cookbook.losses.base import Loss
from cookbook.types import JsonObject

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")

log = logging.getLogger("cookbook")

API = "/api/v1"
PATH = f"{API}/cookbook"
# Path of the tokenizer's files, which follow the layout of the Hugging Face hub.
HUB_PATH = "/hub"
# Version of the protocol. Increase it with every change that makes client and server of different versions incompatible.
WIRE = 2

# Fields that cookbook adds to Tinker's messages, only for `cookbook serve`. Both are "true" or "false".
# Option of forward_backward: whether to return logprobs of tokens that the loss ignores.
ALL_LOGPROBS = "all_logprobs"
# Field of optim_step: whether the caller has read the errors of all earlier calls.
FAILURES_READ = "failures_read"

# Metadata of save_weights_for_sampler by which a client selects what is saved. The server replaces the kind by the actual one.
# One of "base", "delta" and "adapted", the weights under the adapter.
KIND = "cookbook.kind"
# Element type of full weights.
DTYPE = "cookbook.dtype"
# Name of the checkpoint that a delta applies to. If the server has restarted since, it saves a base.
PREDECESSOR = "cookbook.predecessor"
ADAPTED_WEIGHTS = "adapted"

# Metadata of a run: the run's model.dropout, a number. A run without it has the server's.
DROPOUT = "cookbook.dropout"

# Fields of the model that the server determines. With other values a run would not get the results that it expects.
SERVER_FIELDS = ("random", "revision", "dtype", "lora_alpha", "lora_dropout", "router_aux_loss_coef", "add_tokens", "quantize")

# A reachable server responds within this time.
TIMEOUT_S = 10.0
# Timeout of the request that ends the session. If the request fails, the session expires on the server.
CLOSE_S = 10.0
# The client package requires a key. A server without keys ignores it.
NO_KEY = "tml-none"
ADAPTED = "all-linear"


class ClientCall(Protocol[T]):
    """A pending call of the client package."""

    def future(self) -> concurrent.futures.Future[T]: ...


@dataclass(frozen=True)
class ServerInfo:
    """Response of ``cookbook serve`` to the handshake.

    Attributes:
        losses: names of the losses that the server can compute.
        model: configuration of the model.
        digests: digests of the weights and of the tokenizer.
    """

    losses: Collection[str]
    model: JsonObject
    digests: Mapping[str, str]
    tokenizer: str
    max_length: int
    architecture: str
    num_parameters: int

    @classmethod
    def read(cls, response: JsonObject, url: str) -> ServerInfo:
        """Parse the response. Raises BackendError: the server uses another version of the protocol, or is another program."""
        if "wire" not in response or "version" not in response:
            raise not_ours(url)
        if response["wire"] != WIRE:
            raise BackendError(
                f"backend.base_url: the server at {url} is cookbook {response['version']}, which is incompatible with this "
                "version; install the same version on both sides"
            )
        return cls(**{name: response[name] for name in cls.__dataclass_fields__})

    def check(self, model: ModelConfig, url: str) -> None:
        """Compare the model settings. Raises ConfigError: the server's settings differ from ``model``."""
        served = self.model.get("dropout")
        if None not in (served, model.dropout) and served != model.dropout:
            raise ConfigError(
                f"model.dropout: the server at {url} was started with {served}, got {model.dropout}; set it to "
                "the server's value"
            )
        for name in SERVER_FIELDS:
            requested, served = getattr(model, name), self.model.get(name)
            is_used = model.lora_rank or not name.startswith("lora_")
            if is_used and requested != served:
                raise ConfigError(
                    f"model.{name}: the server at {url} was started with {served!r}, got {requested!r}; set it to the server's "
                    f"value, or start the server with model.{name}={requested}"
                )


class Connection:
    """Client of one server.

    Args:
        key: API key; None: send no key.
        key_name: source of the key, for error messages.
        patience_s: seconds that the server may be unreachable before every pending call fails.
        all_logprobs: request logprobs also of tokens that the loss ignores.
        lost: returns an error if the server is permanently gone, else None.
        checkpoint_location: location of the checkpoints, stored in pointers; None: ``base_url``. See :func:`pointers.on_disk`.

    Raises:
        ConfigError: the package ``tinker`` is missing.
        BackendError: the server does not respond, refuses the key, or has an incompatible version.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None,
        key_name: str,
        patience_s: float,
        *,
        all_logprobs: bool = False,
        lost: Callable[[], BackendError | None] = lambda: None,
        checkpoint_location: str | None = None,
    ) -> None:
        self._tinker = require_tinker()
        self._all_logprobs = all_logprobs
        self.url = base_url.rstrip("/")
        self.checkpoint_location = checkpoint_location or self.url
        self.translate_error = ErrorTranslator(self.url, key_name)
        self._key = key
        self._headers = {"X-API-Key": self._key} if self._key else {}
        self.info = self._handshake()
        key = self._key or (NO_KEY if self.info else None)
        self._service: tinker.ServiceClient = self._tinker.ServiceClient(base_url=self.url, api_key=key)
        self.rest: tinker.RestClient = self._translate(lambda: self._tinker.RestClient(base_url=self.url, api_key=key))
        self._lengths: Mapping[str, int | None] = {
            model.model_name: model.max_context_length for model in self.capabilities().supported_models if model.model_name
        }
        self._watchdog = Watchdog(self.url, self._is_reachable, patience_s, self.translate_error.unreachable, lost)
        for client in (self._service, self.rest):
            self._retry_until_given_up(client.holder)

    # ---- capabilities of the server ------------------------------------------------------------------------------

    def knows(self, loss: str) -> bool:
        """Whether the server can compute the loss of this name, exactly as cookbook does."""
        return self.info is not None and loss in self.info.losses

    def options(self, loss: Loss) -> dict[str, float | str] | None:
        """Return the options of a loss for a forward_backward on the server; None if the server supports no options."""
        if not self.knows(loss.name):
            return None
        extras = {} if self._all_logprobs else {ALL_LOGPROBS: "false"}
        return convert.options(loss.call_options()) | extras

    @property
    def divides_gradients(self) -> bool:
        """Whether the server divides the gradient in the optimizer step, and drops the gradient of a failed call.

        If not, :class:`~cookbook.backends.remote.passes.RemotePasses` does both on the client.
        """
        return self.info is not None

    def model_name(self, model: ModelConfig) -> str:
        """Return the server's name for the model: its full name, or the last part of a folder, whose parent may differ there.

        Raises:
            BackendError: the server does not serve the model.
        """
        for name in (model.name, Path(resolved(model.name)).name):
            if name in self._lengths:
                return name
        choices = ", ".join(sorted(self._lengths, key=len)) or "none"
        raise BackendError(f"model.name: {self.url} does not serve {model.name!r}; choose one of these: {choices}")

    def max_length(self, model: ModelConfig) -> int | None:
        """Return the longest sequence that the server supports, in tokens; None if the server does not report it."""
        return self._lengths[self.model_name(model)]

    def capabilities(self) -> tinker.types.GetServerCapabilitiesResponse:
        """Return the server's models."""
        return self._translate(lambda: self.rest.get_server_capabilities().result(timeout=6 * TIMEOUT_S))

    # ---- runs, samplers and checkpoints --------------------------------------------------------------------------

    def create_run(
        self, model: ModelConfig, seed: int, path: str | None = None, *, optimizer: bool = False
    ) -> tinker.TrainingClient:
        """Create a run on the base model, or on the checkpoint ``path``, and wait for it. ``optimizer``: load its state too."""
        service = self._service
        # Other servers have no dropout.
        own = {DROPOUT: str(model.dropout)} if self.info is not None and model.dropout is not None else None
        if path is None:
            refuse_adapter(model)
            name = self.model_name(model)
            call = service.create_lora_training_client(
                name, rank=model.lora_rank, seed=seed, train_unembed=False, user_metadata=own
            )
        elif optimizer:
            call = service.create_training_client_from_state_with_optimizer(path, user_metadata=own)
        else:
            call = service.create_training_client_from_state(path, user_metadata=own)
        return self.follow(call).result()

    def sampler_of(self, *, path: str | None = None, base_model: str | None = None) -> tinker.SamplingClient:
        """Create a sampling client on saved weights, or on a base model, and wait for it."""
        return self.follow(self._service.create_sampling_client(model_path=path, base_model=base_model)).result()

    def origin(self, path: str) -> tuple[str, int]:
        """Return the base model of saved weights, and the rank of their adapter (0: full weights)."""
        weights = self.follow(self.rest.get_weights_info_by_tinker_path(path)).result()
        return weights.base_model, weights.lora_rank or 0

    def kind_of(self, path: str) -> str:
        """Return the kind of a sampler checkpoint of ``cookbook serve``, ``base`` or ``delta``."""
        run_id = path.removeprefix("tinker://").partition("/")[0]
        saved = self.follow(self.rest.list_checkpoints(run_id)).result().checkpoints
        return next(
            ((checkpoint.user_metadata or {}).get(KIND, "base") for checkpoint in saved if checkpoint.tinker_path == path),
            "base",
        )

    def announce(self, sampler: tinker.SamplingClient, count: int) -> None:
        """Ask the server to compute the next ``count`` requests of a sampling client as one batch.

        Only ``cookbook serve`` supports this. The announcement is retried like any request while the server restarts: without
        it logprobs would differ in their last bits. Other errors are ignored, because the requests themselves then fail with a
        better message.
        """
        if self.info is None:
            return
        handle = json.loads(base64.urlsafe_b64decode(sampler.get_sampler_handle()))
        body = {"sampling_session_id": handle["sampling_session_id"], "count": count}
        holder, pool = self._service.holder, self._tinker.lib.client_connection_pool_type.ClientConnectionPoolType.SAMPLE

        async def post() -> None:
            with holder.aclient(pool) as client:
                await client.post(f"{PATH}/batch", body=body, cast_to=type(None))

        with contextlib.suppress(CookbookError):
            self.follow(holder.run_coroutine_threadsafe(holder.execute_with_retries(post))).result()

    def delete(self, path: str) -> None:
        """Delete a checkpoint. A failure is only logged: the checkpoint may have been deleted before."""
        try:
            self.follow(self.rest.delete_checkpoint_from_tinker_path(path)).result()
        except (self._tinker.TinkerError, CookbookError) as error:
            log.info("%s: cannot delete the checkpoint: %s", path, self.translate_error(error))

    # ---- waiting -------------------------------------------------------------------------------------------------

    def follow(self, call: ClientCall[T], kind: type[CookbookError] = BackendError) -> Future[T]:
        """Return a watched future of a call. Its errors are translated, to ``kind`` if the server refused the call."""
        return self._watchdog.follow(call.future(), lambda error: self.translate_error(error, kind))

    def give_up(self) -> None:
        """Fail all pending calls at shutdown, if one has failed and the results of the others are no longer needed."""
        self._watchdog.give_up(BackendError("the trainer is closed"))

    def close(self) -> None:
        """End the session on the server, which frees its memory, and stop retrying requests."""
        self._watchdog.closed = True
        if not self._watchdog.gave_up:
            with contextlib.suppress(self._tinker.TinkerError, concurrent.futures.TimeoutError, RuntimeError, OSError):
                self._service.close("success").result(timeout=CLOSE_S)

    def download_tokenizer(self, name: str, folder: Path) -> None:
        """Copy the files of the tokenizer ``name`` from ``cookbook serve`` into ``folder``.

        Raises:
            BackendError: the server does not respond, or has no such tokenizer.
        """
        import httpx

        try:
            with httpx.Client(base_url=f"{self.url}{HUB_PATH}", headers=self._headers, timeout=TIMEOUT_S) as client:
                for file in client.get(f"/api/models/{name}").raise_for_status().json()["siblings"]:
                    file_name = Path(file["rfilename"]).name
                    (folder / file_name).write_bytes(client.get(f"/{name}/resolve/main/{file_name}").raise_for_status().content)
        except httpx.HTTPError as error:
            raise self.translate_error.unreachable(str(error) or type(error).__name__) from None

    # ---- inside --------------------------------------------------------------------------------------------------

    def _handshake(self) -> ServerInfo | None:
        """Return the server's description of itself; None if the server is not ``cookbook serve``.

        Raises:
            BackendError: the server does not respond, or has an incompatible version.
        """
        # Imported here: a run without a server needs no HTTP client, and starts a quarter of a second sooner.
        import httpx

        try:
            response = httpx.get(f"{self.url}{PATH}", headers=self._headers, timeout=TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self.translate_error.unreachable(str(error) or type(error).__name__) from None
        if response.status_code == httpx.codes.OK:
            try:
                fields = response.json()
            except ValueError:
                raise not_ours(self.url) from None
            return ServerInfo.read(fields if isinstance(fields, dict) else {}, self.url)
        if response.status_code == httpx.codes.UNAUTHORIZED and not self._key:
            raise self.translate_error.wrong_key()
        return None

    def _retry_until_given_up(self, holder: Any) -> None:
        """Make a client of the package retry requests until the watchdog gives up. By default it stops after 5 minutes.

        The default limit still applies to a request that fails although the server is reachable.
        """
        unreachable, waits_for_server = self._tinker.APIConnectionError, self._watchdog.waits_for_server
        execute_within_limit = holder.execute_with_retries

        async def execute(call: Callable[..., Awaitable[T]], *args: object, **kwargs: object) -> T:
            while True:
                try:
                    result: T = await execute_within_limit(call, *args, **kwargs)
                    return result
                except unreachable:
                    if not waits_for_server():
                        raise

        holder.execute_with_retries = execute

    def _is_reachable(self) -> bool:
        import httpx

        try:
            httpx.get(f"{self.url}/api/v1/healthz", timeout=TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return True

    def _translate(self, call: Callable[[], T]) -> T:
        """Run ``call``, which creates a session or queries the models, and translate its errors."""
        try:
            return call()
        except self._tinker.NotFoundError:
            raise not_ours(self.url) from None
        except (self._tinker.TinkerError, ValueError, TimeoutError) as error:
            raise self.translate_error(error) from None


def not_ours(url: str) -> BackendError:
    """Return the error for a web server that is another program."""
    return BackendError(
        f"backend.base_url: the server at {url} is neither `cookbook serve` nor a Tinker service; correct the address"
    )


def refuse_adapter(model: ModelConfig) -> None:
    """Raises ConfigError: the model has an adapter on modules that a server does not support."""
    if model.lora_rank and model.lora_target_modules != ADAPTED:
        raise ConfigError(
            "model.lora_target_modules: a server supports adapters on attention and MLP only, got "
            f"{model.lora_target_modules!r}; set it to {ADAPTED}"
        )


def require_tinker() -> ModuleType:
    """Import the package ``tinker``, without its telemetry, warnings and log lines.

    Raises:
        ConfigError: the package is not installed.
    """
    # With telemetry the package would send tracebacks of the user's program to its vendor.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        package = importlib.import_module("tinker")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend=remote: the package {error.name!r} is not installed; install post-training-cookbook[tinker]"
        ) from None
    # The package warns about a list that mixes stop strings and stop token ids. Its type forbids this, but servers accept it.
    warnings.filterwarnings("ignore", message="Pydantic serializer warnings", category=UserWarning)
    # Suppress its log lines about retries, because the watchdog reports an unreachable server.
    if "TINKER_LOG" not in os.environ:
        logging.getLogger("tinker").setLevel(logging.ERROR)
    return package
