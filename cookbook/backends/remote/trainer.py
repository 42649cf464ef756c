"""A run on a server, behind the :class:`~cookbook.protocols.TrainingClient` protocol."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from cookbook.backends.copies import tokenizer_digests
from cookbook.backends.failures import CallFuture, Failures, PendingStep
from cookbook.backends.info import ModelData, ModelInfo
from cookbook.backends.remote import pointers, surrogate, wire
from cookbook.backends.remote.books import Books
from cookbook.backends.remote.facts import FAILURES_READ
from cookbook.backends.remote.pointers import Pointer
from cookbook.backends.remote.reference import RemoteReference, Start, own
from cookbook.backends.remote.sampler import RemoteSampler
from cookbook.backends.remote.server import Server
from cookbook.backends.worker import Worker
from cookbook.checkpoints import store
from cookbook.deployments.embedded import EmbeddedConfig
from cookbook.engine.loss_gradient import accumulate
from cookbook.engine.model import ModelConfig, context_length, load_tokenizer
from cookbook.engine.outputs import empty_output
from cookbook.errors import BackendError, CheckpointError, ConfigError, RolloutError
from cookbook.futures import Future
from cookbook.losses import Loss, loss_of_call
from cookbook.normalization import Normalization, as_normalization
from cookbook.protocols import Sampler
from cookbook.types import (
    AdamParams,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    OptimStepOutput,
    as_adam,
)

T = TypeVar("T")
Ask = Callable[[Any], Any]
"""Makes a call of the client package on a training client; what it returns is passed to the receiving side."""


class RemoteTrainer:
    """A :class:`TrainingClient` on a server. Calls go out on one thread and are answered on another, both in their order.

    ``folder`` gets a pointer to each checkpoint, which itself stays on the server and is deleted there after its pointer.
    ``failures`` holds the errors that the caller has not read. The run on the server is made when it is first needed: one
    that resumes is made from its checkpoint, and not twice.
    """

    def __init__(
        self,
        model: ModelConfig,
        server: Server,
        *,
        seed: int = 0,
        folder: str | Path = "checkpoints",
        failures: Failures | None = None,
        owns_server: bool = True,
    ) -> None:
        self.server = server
        self.model = model
        self.folder = Path(folder)
        self.seed = seed
        self.step = 0  # as of the calls that have been answered
        if server.facts is not None:
            server.facts.check(model, server.url)
        server.model_name(model)
        self._owns_server = owns_server
        self._start = Start(server, model, seed)
        self._client: Any = None
        self._broken: list[BaseException] = []  # of calls that failed before anything of them went out
        self._ahead: list[BaseException] = []  # of calls that failed while calls before them wait for their answers
        self._failed = False  # a call has failed since the last step that succeeded
        self._newest_call: Future[Any] | None = None
        self._accumulated = surrogate.Accumulated()
        self._lost_gradient: BackendError | None = None
        self._moved = False  # away from where it started
        self._order = threading.Lock()
        self._unseeded: Counter[int] = Counter()
        self._books = Books(server, self.folder)
        self._newest: RemoteSampler | None = None
        self._failures = Failures() if failures is None else failures
        self._sender, self._receiver = Worker(threads=1), Worker(threads=1)

    # ---- passes --------------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        loss = loss_of_call(loss_fn, loss_fn_config)
        rows = own(data)
        if not rows:
            return self._call(lambda _: None, lambda _: empty_output())
        if self.server.knows(loss_fn):
            batch, options = self._wired(rows), wire.options(loss.call_options())
            return self._call(lambda client: self.server.follow(client.forward(batch, loss_fn, options)), wire.passed)

        def ask(client: Any) -> Any:
            return surrogate.slopes(loss, rows, self._forward(client, rows, loss)).output

        return self._call(ask, lambda output: output)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        loss = loss_of_call(loss_fn, loss_fn_config)
        if not (data and self._as_it_is(loss)):
            return self.forward_backward_custom(data, loss)
        batch, options = self._wired(own(data)), self.server.options(loss)

        def ask(client: Any) -> Any:
            self._accumulated.travelled = True
            return self.server.follow(client.forward_backward(batch, loss_fn, options))

        return self._call(ask, wire.passed)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: Any) -> Future[ForwardBackwardOutput]:
        surrogate.check_loss(loss_fn)
        rows = own(data)
        if not rows:
            return self._call(lambda _: None, lambda _: empty_output())

        def ask(client: Any) -> tuple[surrogate.Slopes, Future[Any] | None, Callable[[], None]]:
            accumulated = self._accumulated
            accumulated.check_more(loss_fn)
            found = surrogate.slopes(loss_fn, rows, self._forward(client, rows, loss_fn))
            forget = accumulated.add(loss_fn)
            if not self.server.divides:
                accumulated.held.append(found)
                return found, None, forget
            accumulated.travelled = True
            return found, self._backward(client, found.data), forget

        def receive(answer: tuple[surrogate.Slopes, Future[Any] | None, Callable[[], None]]) -> ForwardBackwardOutput:
            found, backward, forget = answer
            if backward is not None and (error := backward.exception()) is not None:
                forget()
                raise error
            accumulate(found.own)
            return found.output

        return self._call(ask, receive)

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        adam = as_adam(adam_params)
        normalization = as_normalization(grad_accumulation_normalization)
        step = self._failures.step()

        def receive(answer: tuple[Future[Any] | None, Mapping[str, float]]) -> OptimStepOutput:
            asked, known = answer
            error = asked.exception() if asked is not None else None
            self.step += error is None
            if (error := step.error(self._ahead) or error) is not None:
                raise error
            self._failed = False
            return OptimStepOutput({**((asked.result().metrics or {}) if asked is not None else {}), **known})

        self._moved = True
        ask = functools.partial(self._ask_step, adam=adam, normalization=normalization, step=step)
        return self._call(ask, receive, step=step)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        facts: Mapping[str, Any] | None = None,
        sampler: Sampler | None = None,
        asynchronous: bool = False,
    ) -> Future[Checkpoint]:
        """``asynchronous`` makes no difference: later calls never wait here."""
        folder = self._free(name, overwrite)
        older = sampler if isinstance(sampler, RemoteSampler) else None
        if older is not None and older.path is None:
            raise CheckpointError("save_state: the sampler's weights are not saved on the server; take a lagging sampler's")

        def receive(found: Any) -> Checkpoint:
            pointer = Pointer(found.path, self.server.url, self.step, "state")
            lagging = Pointer(older.path, self.server.url, older.step, "base") if older and older.path else None
            pointers.write(folder, pointer, self.model, overwrite=overwrite, facts=facts, sampler=lagging)
            self._books.sweep()
            return Checkpoint(str(folder), self.step, "state")

        return self._call(lambda client: self.server.follow(client.save_state(name, overwrite=overwrite)), receive)

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        """``checkpoint``: a pointer's folder, or what the server calls it (``tinker://...``; its step then counts as 0)."""
        path = str(checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint)
        found = Pointer(path, self.server.url, 0, "state") if path.startswith("tinker://") else pointers.read(Path(path))
        if optimizer and found.kind != "state":
            raise CheckpointError(f"{path}: holds weights only; pass optimizer=False, or a checkpoint made by save_state")

        def ask(_: Any) -> None:
            self._client = replace(self._start, path=found.path, optimizer=optimizer).make()
            self._accumulated, self._lost_gradient, self._broken = surrogate.Accumulated(), None, []

        def receive(_: Any) -> None:
            self.step = found.step if optimizer else 0

        self._moved = True
        return self._call(ask, receive, needs_client=False)

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False
    ) -> Future[Checkpoint]:
        if checkpoint_type != "base":
            raise ConfigError(f"checkpoint_type: a server saves whole weights (base), got {checkpoint_type!r}")
        if merged:
            raise ConfigError("merged: a server saves the adapter; download it, and merge it with `cookbook weights export`")
        folder = self._free(name, overwrite=False)

        def receive(found: Any) -> Checkpoint:
            pointers.write(folder, Pointer(found.path, self.server.url, self.step, "base"), self.model, overwrite=False)
            return Checkpoint(str(folder), self.step, "base")

        return self._call(lambda client: self.server.follow(client.save_weights_for_sampler(name)), receive)

    # ---- samplers and the reference ------------------------------------------------------------------------------

    def live_sampler(self, step: int) -> Future[RemoteSampler]:
        """A sampler on the weights in training. It refuses to answer once newer ones have been put into service."""

        def check() -> None:
            if self._newest is not made[0]:
                raise RolloutError(f"the weights have moved on since the sampler of step {step} was made; sync again")

        def receive(client: Any) -> RemoteSampler:
            self._at(step)
            made.append(RemoteSampler(self.server, client, step, seeds=self._sampling_seed, check=check))
            self._newest = made[0]
            return made[0]

        made: list[RemoteSampler] = []
        if self._newest is not None:
            self._newest.flush()  # what it was asked is answered by its own weights
        return self._call(self._ask_sampler("inflight"), receive)

    def snapshot_sampler(self, step: int | None = None) -> Future[RemoteSampler]:
        """A sampler on a copy, in the server's memory, of the weights as they are when this call's turn comes."""

        def receive(client: Any) -> RemoteSampler:
            return RemoteSampler(self.server, client, self._at(step), seeds=self._sampling_seed)

        return self._call(self._ask_sampler("snapshot"), receive)

    def lagging_sampler(self, step: int) -> Future[RemoteSampler]:
        """As :meth:`snapshot_sampler`, saved on the server, so that a checkpoint can name its weights. They are deleted when
        neither a sampler nor a checkpoint holds on to them.
        """

        def ask(client: Any) -> Any:
            name = f"sampler-{step:06d}-{self._books.number()}"
            path = self.server.follow(client.save_weights_for_sampler(name)).result().path
            return path, self.server.sampler_of(path=path)

        def receive(found: tuple[str, Any]) -> RemoteSampler:
            path, client = found
            sampler = RemoteSampler(self.server, client, self._at(step), seeds=self._sampling_seed, path=path)
            self._books.lagging(path, sampler)
            return sampler

        return self._call(ask, receive)

    @property
    def max_batch_tokens(self) -> int:
        """What a server samples at once is its own business: this says nothing."""
        return EmbeddedConfig.max_batch_tokens

    @max_batch_tokens.setter
    def max_batch_tokens(self, value: int) -> None:
        if value != self.max_batch_tokens:
            raise ConfigError(
                f"deployment.max_batch_tokens: the server decides what it samples at once, got {value}; leave it at "
                f"{self.max_batch_tokens}"
            )

    def reference(self) -> RemoteReference:
        """The weights as they are now, frozen: another run that starts where this one did, and that nobody trains."""
        start = self._start
        if self._moved:
            saved = self.save_weights_for_sampler_ext(f"reference-{self._books.number()}").result()
            start = replace(start, path=pointers.read(Path(saved.path)).path)
        return RemoteReference(self._call, start, self._wired)

    # ---- facts ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def tokenizer(self) -> Any:
        """From the folder or hub id that the model's name is, else from the one the server names."""
        there = self.server.facts.tokenizer if self.server.facts else self.model.name
        folders = [name for name in (self.model.name, there) if Path(name).is_dir()]
        return load_tokenizer(replace(self.model, name=folders[0] if folders else there))

    @functools.cached_property
    def max_length(self) -> int:
        """The longest sequence the model takes, tokens."""
        limits = [self.server.max_length(self.model), context_length(None, self.tokenizer)]
        return min((limit for limit in limits if limit), default=1 << 30)

    def digests(self) -> dict[str, str]:
        """What tells the model from another one of the same name; of its weights only where the server tells.

        Raises:
            ConfigError: the server's tokenizer is another one.
        """
        own = tokenizer_digests(self.tokenizer)
        if self.server.facts is None:
            return own
        there = self.server.facts.digests
        if there["tokenizer"] != own["tokenizer"]:
            raise ConfigError(
                f"model.name: the tokenizer of {self.tokenizer.name_or_path!r} is not the one that {self.server.url} was "
                "started with; use the same model folder on both sides"
            )
        return {"weights": there["weights"], **own}

    def info(self) -> ModelInfo:
        found, name = self.server.facts, self.model.name
        architecture, parameters = (found.architecture, found.num_parameters) if found else ("", 0)
        data = ModelData(architecture, name, self.tokenizer.name_or_path)
        return ModelInfo(data, name, self.model.lora_rank, self.model.lora_rank > 0, parameters, self.max_length)

    def close(self) -> None:
        """Wait for calls under way, unless an error is unread; then raise that error."""
        if self._failures.errors:
            self.server.give_up()
        self._sender.close()
        self._receiver.close()
        if not self._failed:
            self._books.sweep(closing=True)
        if self._owns_server:
            self.server.close()
        self._failures.raise_unread()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _call(
        self,
        ask: Ask,
        receive: Callable[[Any], T],
        *,
        needs_client: bool = True,
        step: PendingStep | None = None,
    ) -> Future[T]:
        """``ask`` goes out after all earlier calls, ``receive`` gets its answer after they have got theirs."""
        failures = step or self._failures

        def send() -> Any:
            try:
                if step is not None and step.after_read and before is not None:
                    concurrent.futures.wait([before])  # the step says whether every error has been read: all must be known
                if needs_client and self._client is None:
                    self._client = self._start.make()
                if needs_client and self._lost_gradient is not None:
                    raise self._lost_gradient
                return ask(self._client)
            except BaseException as error:
                if step is None:
                    self._broken.append(error)
                    self._ahead.append(error)
                    failures.note(error)
                raise

        def answer() -> T:
            try:
                if step is not None and (error := sent.exception()) is not None:
                    raise step.error(self._ahead) or error
                found = sent.result()
                return receive(found.result() if isinstance(found, Future) else found)
            except BaseException as error:
                self._failed = True
                failures.note(error)
                if any(one is error for one in self._ahead):
                    self._ahead.remove(error)
                raise

        with self._order:
            before = self._newest_call
            sent = self._sender.submit(send)
            future: CallFuture[T] = CallFuture(failures.read)
            self._newest_call = future
            return self._receiver.submit(answer, future)

    def _forward(self, client: Any, rows: Sequence[Datum], loss: Any) -> ForwardBackwardOutput:
        """A pass whose logprobs a loss is computed from here. Waits for it."""
        if isinstance(loss, Loss):
            loss.check_data(rows)
        batch = self._wired(rows, surrogate.KEYS)
        return wire.passed(self.server.follow(client.forward(batch, surrogate.LINEAR)).result())

    def _backward(self, client: Any, rows: Sequence[Datum]) -> Future[Any]:
        return self.server.follow(client.forward_backward(self._wired(rows), surrogate.LINEAR))

    def _ask_step(
        self, client: Any, adam: AdamParams, normalization: Normalization | None, step: PendingStep
    ) -> tuple[Future[Any] | None, dict[str, float]]:
        """Sends the step, and before it what has been held back."""
        accumulated, self._accumulated = self._accumulated, surrogate.Accumulated()
        broken, self._broken = self._broken, []
        known = step.known
        if (error := next((one for one in broken if any(one is other for other in known)), None)) is not None:
            if accumulated.travelled:
                self._lost_gradient = BackendError(
                    "the server holds a part of a gradient whose rest has failed; load a checkpoint, or make a new run"
                )
            raise error
        accumulated.check(normalization)
        if self.server.divides:
            return self.server.follow(
                client.optim_step(self._step_message(adam, normalization, step.after_read and not known))
            ), {}
        if normalization is not None and accumulated.travelled:
            raise ConfigError(
                f"optim_step: this server cannot divide by {normalization}, and part of the gradient is there already; give "
                "the loss the same normalization"
            )
        counts = accumulated.counts()
        divisor = counts.divisor(normalization)
        own_metrics = {
            "optim/lr": adam.learning_rate,
            "optim/divisor": divisor,
            "optim/num_loss_tokens": float(counts.num_loss_tokens),
            "optim/num_sequences": float(counts.num_sequences),
        }
        if not accumulated.travelled and not counts.num_loss_tokens:
            return None, {**own_metrics, "optim/grad_norm": 0.0}  # without a gradient nothing moves, and the step counts
        for one in accumulated.held:
            self._backward(client, one.divided(divisor))
        asked = self.server.follow(client.optim_step(self.server.wire.adam(asdict(adam))))
        return asked, {"optim/lr": adam.learning_rate} if accumulated.travelled else own_metrics

    def _step_message(self, adam: AdamParams, normalization: Normalization | None, failures_read: bool) -> Any:
        extras = {FAILURES_READ: str(failures_read).lower()}
        if normalization is not None:
            extras["grad_accumulation_normalization"] = str(normalization)
        return self.server.wire.adam(asdict(adam), extras)

    def _ask_sampler(self, kind: str) -> Ask:
        return lambda client: self.server.follow(client.save_weights_and_get_sampling_client(kind=kind))

    def _as_it_is(self, loss: Loss) -> bool:
        """Whether the server computes this loss itself. All know cross-entropy; those that cannot divide get it undivided."""
        return self.server.knows(loss.name) or (loss.name == surrogate.LINEAR and loss.normalization is None)

    def _wired(self, rows: Sequence[Datum], keys: Sequence[str] | None = None) -> list[Any]:
        """``keys`` None: all inputs, on a server of ours; others know a fixed set, and no temperature.

        Raises:
            ConfigError: logprobs are wanted under a temperature, and the server knows none.
        """
        if not self.server.divides:
            keys = [key for key in surrogate.KEYS if key != "temperature" and (keys is None or key in keys)]
            if any("temperature" in row.loss_fn_inputs for row in rows):
                raise ConfigError("rollout.temperature: this server computes logprobs under temperature 1 only; set it to 1.0")
        return [self.server.wire.datum(row, keys) for row in rows]

    def _free(self, name: str, overwrite: bool) -> Path:
        """The folder for a pointer. Raises CheckpointError: it is taken."""
        folder = store.named(self.folder, name)
        if folder.exists() and not overwrite:
            raise CheckpointError(f"{folder}: exists already; choose another name")
        return folder

    def _at(self, step: int | None) -> int:
        if step is not None and self.step != step:
            raise BackendError(f"the weights have seen {self.step} steps, not {step}")
        return self.step

    def _sampling_seed(self, step: int) -> int:
        """For a request that brings none, as the embedded trainer has it."""
        with self._order:
            self._unseeded[step] += 1
            return (self.seed * 1_000_003 + step) * 1_000_003 + self._unseeded[step]
