"""A run on a server behind the :class:`~cookbook.protocols.Trainer` protocol: checkpoints, samplers and model information."""

from __future__ import annotations

import functools
import itertools
import secrets
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.backends.client_factory import ModelData, ModelInfo, checkpoint_path
from cookbook.backends.remote import convert, pointers
from cookbook.backends.remote.connection import KIND, PREDECESSOR, Connection
from cookbook.backends.remote.linearized_loss import LINEAR, PendingGradient
from cookbook.backends.remote.passes import CallQueue, CreateRun, RemotePasses, Send
from cookbook.backends.remote.pointers import CheckpointGarbage, Pointer
from cookbook.backends.remote.sampler import RemoteSampler
from cookbook.checkpoints import sampler_checkpoints, store
from cookbook.checkpoints.snapshots import tokenizer_digests
from cookbook.engine.model import ModelConfig, context_length, load_tokenizer
from cookbook.errors import BackendError, CheckpointError, ConfigError, RolloutError
from cookbook.futures import Failures, Future
from cookbook.protocols import MAX_BATCH_TOKENS, Sampler
from cookbook.types import Array, Checkpoint, Datum, JsonObject, as_datum, request_seed

if TYPE_CHECKING:
    import tinker
    from transformers import PreTrainedTokenizerBase


class RemoteTrainer(RemotePasses):
    """A :class:`~cookbook.protocols.Trainer` on a server.

    Checkpoints stay on the server. Each has a pointer in ``folder``, and is deleted once the pointer is deleted.

    Args:
        folder: destination of the pointers.
        failures: the errors that the caller has not read.
        owns_connection: whether :meth:`close` also closes the connection.
    """

    def __init__(
        self,
        model: ModelConfig,
        connection: Connection,
        *,
        seed: int = 0,
        folder: str | Path = "checkpoints",
        failures: Failures | None = None,
        owns_connection: bool = True,
    ) -> None:
        if connection.info is not None:
            connection.info.check(model, connection.url)
        connection.model_name(model)
        self._create_run = functools.partial(connection.create_run, model, seed)
        self._failures = Failures() if failures is None else failures
        super().__init__(connection, CallQueue(self._create_run, self._failures))
        self.model = model
        self.folder = Path(folder)
        self.seed = seed
        self._owns_connection = owns_connection
        # Number of sampling requests without a seed so far, by step.
        self._unseeded: Counter[int] = Counter()
        self._lock = threading.Lock()
        # Numbers the checkpoints that only samplers and the reference use, to give them unique names.
        self._numbers = itertools.count()
        self._garbage = CheckpointGarbage(connection, self.folder)
        self._newest: RemoteSampler | None = None
        # Name of the last sampler checkpoint that was requested: the next delta applies to it. None: the weights were replaced.
        self._last_sent: str | None = None

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        facts: JsonObject | None = None,
        sampler: Sampler | None = None,
        asynchronous: bool = False,
        optimizer: bool = True,
    ) -> Future[Checkpoint]:
        """Save weights, optimizer and step. ``asynchronous`` has no effect, because the server never blocks later calls."""
        folder = self._new_folder(name, overwrite)
        write_sampler = self._writer_of(sampler)
        kind = "state" if optimizer else store.WEIGHTS_ONLY

        def receive(saved: tinker.types.SaveWeightsResponse | tinker.types.SaveWeightsForSamplerResponse) -> Checkpoint:
            pointer = Pointer(saved.path, self.connection.checkpoint_location, self.step, kind)
            pointers.write(folder, pointer, self.model, overwrite=overwrite, facts=facts, write_sampler=write_sampler)
            self._garbage.sweep()
            return Checkpoint(str(folder), self.step, kind)

        return self._calls.call(self._saving(name, overwrite=overwrite, optimizer=optimizer), receive)

    def _saving(
        self, name: str, *, overwrite: bool, optimizer: bool
    ) -> Callable[
        [tinker.TrainingClient], Future[tinker.types.SaveWeightsResponse | tinker.types.SaveWeightsForSamplerResponse]
    ]:
        """Return the call that saves a checkpoint on the server. Names of weights are unique: they cannot be overwritten."""
        if optimizer:
            return lambda client: self.connection.follow(client.save_state(name, overwrite=overwrite))
        unique = f"{name}-{secrets.token_hex(4)}"
        return lambda client: self.connection.follow(client.save_weights_for_sampler(unique))

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        """Load a checkpoint by its pointer or its address, ``tinker://...``. For an address the step is set to 0."""
        path = checkpoint_path(checkpoint)
        saved = (
            Pointer(path, self.connection.checkpoint_location, 0, "state")
            if path.startswith("tinker://")
            else pointers.read(Path(path))
        )
        if optimizer and saved.kind != "state":
            raise CheckpointError(f"{path}: holds weights only; pass optimizer=False, or a checkpoint made by save_state")

        def send(_: tinker.TrainingClient) -> None:
            self._calls.start_over(functools.partial(self._create_run, saved.path, optimizer=optimizer))
            self._gradient = PendingGradient()
            self._last_sent = None

        def receive(_: None) -> None:
            self.step = saved.step if optimizer else 0

        self._weights_changed = True
        return self._calls.call(send, receive, needs_client=False)

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False
    ) -> Future[Checkpoint]:
        """Save weights to sample from, on the server. A delta becomes a base if the server cannot apply it to the last one."""
        sampler_checkpoints.check_kind(checkpoint_type)
        if checkpoint_type == "delta" and self.connection.info is None:
            raise ConfigError("checkpoint_type: only `cookbook serve` saves deltas, got 'delta'; save a base")
        if merged:
            raise ConfigError("merged: a server saves the adapter; download it, and merge it with `cookbook weights export`")
        folder = self._new_folder(name, overwrite=False)
        # An adapter stands alone.
        is_delta = checkpoint_type == "delta" and not self.model.lora_rank

        def send(client: tinker.TrainingClient) -> Future[tinker.types.SaveWeightsForSamplerResponse]:
            metadata: dict[str, str] | None = None
            if is_delta:
                if self._last_sent is None:
                    raise CheckpointError(f"{folder}: a delta needs a checkpoint before it; write a base first")
                metadata = {KIND: "delta", PREDECESSOR: self._last_sent}
            self._last_sent = name
            return self.connection.follow(client.save_weights_for_sampler(name, user_metadata=metadata))

        def receive(saved: tinker.types.SaveWeightsForSamplerResponse) -> Checkpoint:
            kind = self.connection.kind_of(saved.path) if is_delta else "base"
            pointer = Pointer(saved.path, self.connection.checkpoint_location, self.step, kind)
            pointers.write(folder, pointer, self.model, overwrite=False)
            return Checkpoint(str(folder), self.step, kind)

        return self._calls.call(send, receive)

    # ---- samplers and the reference ------------------------------------------------------------------------------

    def live_sampler(self, step: int) -> Future[RemoteSampler]:
        """Return a sampler on the weights in training. The sampler raises once a sampler of newer weights was created."""

        def receive(client: tinker.SamplingClient) -> RemoteSampler:
            def check() -> None:
                if self._newest is not sampler:
                    raise RolloutError(
                        f"sample: the weights have changed since the sampler of step {step} was created; sync again"
                    )

            sampler = RemoteSampler(self.connection, client, self._require_step(step), seeds=self._sampling_seed, check=check)
            self._newest = sampler
            return sampler

        if self._newest is not None:
            # Send the queued requests first: afterwards the server would sample them from the new weights.
            self._newest.flush()
        return self._calls.call(self._send_sampler("inflight"), receive)

    def snapshot_sampler(self, step: int | None = None) -> Future[RemoteSampler]:
        """Return a sampler on a copy of the weights at this call's turn. The copy is in the memory of the server."""

        def receive(client: tinker.SamplingClient) -> RemoteSampler:
            return RemoteSampler(self.connection, client, self._require_step(step), seeds=self._sampling_seed)

        return self._calls.call(self._send_sampler("snapshot"), receive)

    def lagging_sampler(self, step: int) -> Future[RemoteSampler]:
        """Return a sampler on a copy of the weights that is saved on the server, so that a checkpoint can refer to it.

        The copy is deleted once no sampler and no checkpoint refers to it.
        """

        def send(client: tinker.TrainingClient) -> tuple[str, tinker.SamplingClient]:
            name = f"sampler-{step:06d}-{next(self._numbers)}"
            path: str = self.connection.follow(client.save_weights_for_sampler(name)).result().path
            return path, self.connection.sampler_of(path=path)

        def receive(answer: tuple[str, tinker.SamplingClient]) -> RemoteSampler:
            path, client = answer
            sampler = RemoteSampler(self.connection, client, self._require_step(step), seeds=self._sampling_seed, path=path)
            self._garbage.keep_for(path, sampler)
            return sampler

        return self._calls.call(send, receive)

    @property
    def max_batch_tokens(self) -> int:
        """The default value. The server decides how many tokens it samples together."""
        return MAX_BATCH_TOKENS

    @max_batch_tokens.setter
    def max_batch_tokens(self, value: int) -> None:
        if value != MAX_BATCH_TOKENS:
            raise ConfigError(
                f"deployment.max_batch_tokens: the server decides what it samples together, got {value}; leave it at "
                f"{MAX_BATCH_TOKENS}"
            )

    def reference(self) -> RemoteReference:
        """Return the current weights, frozen: a second run on the server that starts from them and is never trained."""
        create_run: CreateRun = self._create_run
        if self._weights_changed:
            saved = self.save_weights_for_sampler_ext(f"reference-{next(self._numbers)}").result()
            create_run = functools.partial(self._create_run, pointers.read(Path(saved.path)).path)
        return RemoteReference(self._calls, create_run, self)

    # ---- facts ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the local model folder if it exists, else that of the server."""
        if self.connection.info is None or Path(self.model.name).is_dir():
            return load_tokenizer(self.model)
        name = self.connection.info.tokenizer
        if self.model.trust_remote_code:
            # Code is loaded from the hub only.
            return load_tokenizer(replace(self.model, name=name))
        with tempfile.TemporaryDirectory() as folder:
            self.connection.download_tokenizer(name, Path(folder))
            tokenizer = load_tokenizer(replace(self.model, name=folder, revision=None))
        tokenizer.name_or_path = name
        return tokenizer

    @functools.cached_property
    def max_length(self) -> int:
        """The longest sequence that the model supports, in tokens."""
        limits = [self.connection.max_length(self.model), context_length(None, self.tokenizer)]
        return min((limit for limit in limits if limit), default=1 << 30)

    def digests(self) -> dict[str, str]:
        """Return digests of the tokenizer and, if the server is ``cookbook serve``, of the loaded weights, and the precision.

        Raises:
            ConfigError: the server has another tokenizer.
        """
        local = tokenizer_digests(self.tokenizer)
        if self.connection.info is None:
            return local
        remote = self.connection.info.digests
        if remote["tokenizer"] != local["tokenizer"]:
            raise ConfigError(
                f"model.name: the tokenizer of {self.tokenizer.name_or_path!r} differs from that of {self.connection.url}; use "
                "the same model folder on both sides"
            )
        return {**remote, **local}

    def info(self) -> ModelInfo:
        server, name = self.connection.info, self.model.name
        architecture, parameters = (server.architecture, server.num_parameters) if server else ("", 0)
        data = ModelData(architecture, name, self.tokenizer.name_or_path)
        return ModelInfo(data, name, self.model.lora_rank, self.model.lora_rank > 0, parameters, self.max_length)

    def close(self) -> None:
        """Wait for pending calls and close. If an error is unread, do not wait; raise that error."""
        if self._failures.errors:
            self.connection.give_up()
        self._calls.close()
        if not self._calls.failed:
            self._garbage.sweep(closing=True)
        if self._owns_connection:
            self.connection.close()
        self._failures.raise_unread()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _send_sampler(self, kind: str) -> Send:
        return lambda client: self.connection.follow(client.save_weights_and_get_sampling_client(kind=kind))

    def _writer_of(self, sampler: object) -> Callable[[Path], object] | None:
        """Return a function that writes the weights of a sampler to a new folder; None without a sampler."""
        if sampler is None:
            return None
        if not isinstance(sampler, RemoteSampler) or sampler.path is None:
            raise CheckpointError("save_state: the sampler's weights are not saved; pass a sampler of this trainer")
        pointer = Pointer(sampler.path, self.connection.checkpoint_location, sampler.step, "base")
        return functools.partial(pointers.write, pointer=pointer, model=self.model, overwrite=False)

    def _new_folder(self, name: str, overwrite: bool) -> Path:
        """Return the folder for a new checkpoint. Raises CheckpointError: the folder exists."""
        folder = store.named(self.folder, name)
        if folder.exists() and not overwrite:
            raise CheckpointError(f"{folder}: exists already; choose another name")
        return folder

    def _require_step(self, step: int | None) -> int:
        if step is not None and self.step != step:
            raise BackendError(f"the weights are at step {self.step}, expected step {step}; sync after the step is done")
        return self.step

    def _sampling_seed(self, step: int) -> int:
        """Return the seed of the next request without one."""
        with self._lock:
            self._unseeded[step] += 1
            return request_seed(self.seed, step, self._unseeded[step])


class RemoteReference:
    """A :class:`~cookbook.protocols.Reference` that is a separate run on the server, created at the first call."""

    def __init__(self, calls: CallQueue, create_run: CreateRun, passes: RemotePasses) -> None:
        self._calls = calls
        self._create_run = create_run
        self._passes = passes
        self._client: tinker.TrainingClient | None = None

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Array]]:
        rows = [as_datum(datum, index) for index, datum in enumerate(data)]
        batch = self._passes.convert_datums(rows, ("target_tokens", "temperature"))

        def send(_: tinker.TrainingClient) -> Future[tinker.ForwardBackwardOutput]:
            if self._client is None:
                self._client = self._create_run()
            return self._passes.connection.follow(self._client.forward(batch, LINEAR))

        def receive(result: tinker.ForwardBackwardOutput) -> list[Array]:
            return [row["logprobs"].to_numpy() for row in convert.outputs(result)]

        return self._calls.call(send, receive, needs_client=False)
