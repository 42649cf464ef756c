"""Calls of a run on a server: forward and backward passes, and optimizer steps.

One thread sends the calls in order, and another receives the results in order.

``cookbook serve`` divides a gradient and drops the gradient of a failed call. Other servers do neither. For them the client
defers backward passes until the optimizer step, divides the gradient, and sends only those of calls that succeeded.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from cookbook.backends.remote import convert
from cookbook.backends.remote.connection import FAILURES_READ, Connection
from cookbook.backends.remote.linearized_loss import KEYS, LINEAR, LinearizedLoss, PendingGradient, check_loss, linearize
from cookbook.backends.worker import Worker
from cookbook.engine.forward import empty_output
from cookbook.engine.loss_gradient import LossFunction, accumulate
from cookbook.errors import BackendError, ConfigError
from cookbook.futures import CallFuture, Failures, Future, PendingStep
from cookbook.losses.base import Loss, loss_of_call
from cookbook.losses.normalization import Normalization, as_normalization
from cookbook.types import AdamParams, Datum, ForwardBackwardOutput, JsonObject, OptimStepOutput, as_adam, as_datum

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")

# Sends a call on a training client of the package ``tinker``, and returns its result or the future of its result.
Send: TypeAlias = "Callable[[tinker.TrainingClient], Any]"
# Creates a run on the server, on the base model or on saved weights, and waits for it.
CreateRun: TypeAlias = "Callable[[], tinker.TrainingClient]"


class CallQueue:
    """Calls of one run, in order. The run on the server is created by the first call that needs it.

    A trainer that resumes loads a checkpoint first, so it creates only one run.

    Attributes:
        failures: the errors that the caller has not read.
        failed: whether a call has failed since the last successful optimizer step.
        lost_gradient: error of every call until the run starts over; None: the gradient on the server is intact.
        unsent_ahead: errors of calls that could not be sent, and whose turn to be received has not come yet.
    """

    def __init__(self, create_run: CreateRun, failures: Failures) -> None:
        self.failures = failures
        self.failed = False
        self.lost_gradient: BackendError | None = None
        self.unsent_ahead: list[BaseException] = []
        self._create_run = create_run
        self._client: tinker.TrainingClient | None = None
        # Errors of calls since the last optimizer step that could not be sent.
        self._unsent: list[BaseException] = []
        self._newest: Future[Any] | None = None
        self._order = threading.Lock()
        self._sender, self._receiver = Worker(threads=1), Worker(threads=1)

    def call(
        self,
        send: Send,
        receive: Callable[[Any], T],
        *,
        needs_client: bool = True,
        step: PendingStep | None = None,
    ) -> Future[T]:
        """Queue a call.

        Args:
            send: sends the call; runs after all earlier calls have been sent.
            receive: converts the result; runs after all earlier calls have received theirs.
            needs_client: whether the call needs the run on the server.
            step: the optimizer step that the call makes, if any.
        """
        failures = step or self.failures

        def run_send() -> Any:
            try:
                if step is not None and step.after_read and before is not None:
                    # The step reports to the server whether the caller has read all errors, so wait until all are known.
                    concurrent.futures.wait([before])
                if needs_client and self._client is None:
                    self._client = self._create_run()
                if needs_client and self.lost_gradient is not None:
                    raise self.lost_gradient
                return send(self._client)
            except BaseException as error:
                if step is None:
                    self._unsent.append(error)
                    self.unsent_ahead.append(error)
                    failures.record(error)
                raise

        def run_receive() -> T:
            try:
                if step is not None and (error := sent.exception()) is not None:
                    raise step.error(self.unsent_ahead) or error
                result = sent.result()
                return receive(result.result() if isinstance(result, Future) else result)
            except BaseException as error:
                self.failed = True
                failures.record(error)
                if any(unsent is error for unsent in self.unsent_ahead):
                    self.unsent_ahead.remove(error)
                raise

        with self._order:
            before = self._newest
            sent = self._sender.submit(run_send)
            future: CallFuture[T] = CallFuture(failures)
            self._newest = future
            return self._receiver.submit(run_receive, future)

    def take_unsent(self) -> list[BaseException]:
        """Return and clear the errors of calls since the last optimizer step that could not be sent."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def start_over(self, create_run: CreateRun) -> None:
        """Continue with a new run on the server, and wait for it. Only the ``send`` function of a call may do this."""
        self._client = create_run()
        self.lost_gradient, self._unsent = None, []

    def close(self) -> None:
        """Wait for the queued calls, and end both threads."""
        self._sender.close()
        self._receiver.close()


_Backward: TypeAlias = "tuple[LinearizedLoss, Future[tinker.ForwardBackwardOutput] | None, Callable[[], None]]"
_Step: TypeAlias = "tuple[Future[tinker.OptimStepResponse] | None, Mapping[str, float]]"


class RemotePasses:
    """Forward and backward passes and optimizer steps. ``step`` counts the optimizer steps whose result has arrived."""

    def __init__(self, connection: Connection, calls: CallQueue) -> None:
        self.step = 0
        self.connection = connection
        # Whether the weights may differ from the initial ones.
        self._weights_changed = False
        self._calls = calls
        self._gradient = PendingGradient()

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: JsonObject | None = None
    ) -> Future[ForwardBackwardOutput]:
        loss = loss_of_call(loss_fn, loss_fn_config)
        rows = [as_datum(datum, index) for index, datum in enumerate(data)]
        if not rows:
            return self._calls.call(lambda _: None, lambda _: empty_output())
        if self.connection.knows(loss_fn):
            batch, options = self.convert_datums(rows), convert.options(loss.call_options())
            return self._calls.call(
                lambda client: self.connection.follow(client.forward(batch, loss_fn, options)), convert.pass_output
            )

        def send(client: tinker.TrainingClient) -> ForwardBackwardOutput:
            return linearize(loss, rows, self._forward(client, rows, loss)).output

        return self._calls.call(send, lambda output: output)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: JsonObject | None = None
    ) -> Future[ForwardBackwardOutput]:
        loss = loss_of_call(loss_fn, loss_fn_config)
        if not (data and self._is_sent_by_name(loss)):
            return self.forward_backward_custom(data, loss)
        rows = [as_datum(datum, index) for index, datum in enumerate(data)]
        batch, options = self.convert_datums(rows), self.connection.options(loss)

        def send(client: tinker.TrainingClient) -> Future[tinker.ForwardBackwardOutput]:
            self._gradient.sent = True
            return self.connection.follow(client.forward_backward(batch, loss_fn, options))

        return self._calls.call(send, convert.pass_output)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: LossFunction) -> Future[ForwardBackwardOutput]:
        check_loss(loss_fn)
        rows = [as_datum(datum, index) for index, datum in enumerate(data)]
        if not rows:
            return self._calls.call(lambda _: None, lambda _: empty_output())

        def send(client: tinker.TrainingClient) -> _Backward:
            gradient = self._gradient
            gradient.check_addition(loss_fn)
            linear = linearize(loss_fn, rows, self._forward(client, rows, loss_fn))
            remove = gradient.add(loss_fn)
            if not self.connection.divides_gradients:
                gradient.deferred.append(linear)
                gradient.counts.add(linear.num_loss_tokens, linear.num_sequences)
                return linear, None, remove
            gradient.sent = True
            return linear, self._backward(client, linear.data), remove

        def receive(result: _Backward) -> ForwardBackwardOutput:
            linear, backward, remove = result
            if backward is not None and (error := backward.exception()) is not None:
                remove()
                raise error
            accumulate(linear.own)
            return linear.output

        return self._calls.call(send, receive)

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        adam = as_adam(adam_params)
        normalization = as_normalization(grad_accumulation_normalization)
        step = self._calls.failures.step()
        self._weights_changed = True

        def receive(result: _Step) -> OptimStepOutput:
            response, own_metrics = result
            error = response.exception() if response is not None else None
            self.step += error is None
            if (error := step.error(self._calls.unsent_ahead) or error) is not None:
                raise error
            self._calls.failed = False
            return OptimStepOutput({**((response.result().metrics or {}) if response is not None else {}), **own_metrics})

        return self._calls.call(lambda client: self._send_step(client, adam, normalization, step), receive, step=step)

    def convert_datums(self, rows: Sequence[Datum], keys: Sequence[str] | None = None) -> list[tinker.Datum]:
        """Convert datums with the loss inputs ``keys``; None: all for ``cookbook serve``, the known ones for other servers.

        Raises:
            ConfigError: the datums have a temperature, which the server does not support.
        """
        if not self.connection.divides_gradients:
            keys = [key for key in KEYS if key != "temperature" and (keys is None or key in keys)]
            if any("temperature" in row.loss_fn_inputs for row in rows):
                raise ConfigError("rollout.temperature: this server supports logprobs at temperature 1 only; set it to 1.0")
        return [convert.datum(row, keys) for row in rows]

    # ---- inside, on the sending thread ---------------------------------------------------------------------------

    def _forward(self, client: tinker.TrainingClient, rows: Sequence[Datum], loss: LossFunction) -> ForwardBackwardOutput:
        """Compute the logprobs for a loss that the client computes, and wait for them."""
        if isinstance(loss, Loss):
            loss.check_data(rows)
        return convert.pass_output(self.connection.follow(client.forward(self.convert_datums(rows, KEYS), LINEAR)).result())

    def _backward(self, client: tinker.TrainingClient, rows: Sequence[Datum]) -> Future[tinker.ForwardBackwardOutput]:
        return self.connection.follow(client.forward_backward(self.convert_datums(rows), LINEAR))

    def _send_step(
        self, client: tinker.TrainingClient, adam: AdamParams, normalization: Normalization | None, step: PendingStep
    ) -> _Step:
        """Send the deferred gradient, then the step."""
        gradient, self._gradient = self._gradient, PendingGradient()
        unsent, known = self._calls.take_unsent(), step.known
        if (error := next((error for error in unsent if any(error is known_error for known_error in known)), None)) is not None:
            if gradient.sent:
                self._calls.lost_gradient = BackendError(
                    "optim_step: the server has accumulated an incomplete gradient, because another call failed; load a "
                    "checkpoint, or create a new run"
                )
            raise error
        gradient.check(normalization)
        if self.connection.divides_gradients:
            extras = {FAILURES_READ: str(step.after_read and not known).lower()}
            if normalization is not None:
                extras["grad_accumulation_normalization"] = str(normalization)
            return self.connection.follow(client.optim_step(convert.adam(adam, extras))), {}
        if normalization is not None and gradient.sent:
            raise ConfigError(
                f"optim_step: this server cannot divide by {normalization}, and has already accumulated part of the gradient; "
                "set the normalization of the loss instead"
            )
        counts = gradient.counts
        divisor = counts.divisor(normalization)
        own_metrics = {
            "optim/lr": adam.learning_rate,
            "optim/divisor": divisor,
            "optim/num_loss_tokens": float(counts.num_loss_tokens),
            "optim/num_sequences": float(counts.num_sequences),
        }
        if not gradient.sent and not counts.num_loss_tokens:
            # Without a gradient there is nothing to send, but the step still counts.
            return None, {**own_metrics, "optim/grad_norm": 0.0}
        for linear in gradient.deferred:
            self._backward(client, linear.divided(divisor))
        response = self.connection.follow(client.optim_step(convert.adam(adam)))
        return response, {"optim/lr": adam.learning_rate} if gradient.sent else own_metrics

    def _is_sent_by_name(self, loss: Loss) -> bool:
        """Whether the server computes the loss. All servers know cross-entropy; only ``cookbook serve`` knows normalization."""
        return self.connection.knows(loss.name) or (loss.name == LINEAR and loss.normalization is None)
