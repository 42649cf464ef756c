"""Moments of a run that other code may want to know about. Derive from :class:`Hook` and override what you need."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cookbook.errors import HookError, described

if TYPE_CHECKING:
    from cookbook.protocols import Sampler
    from cookbook.types import Checkpoint


log = logging.getLogger("cookbook")


class Hook:
    """Does nothing at every moment of a run.

    A hook that raises ends the run: the step is finished and saved first, then the command exits with code 2 and one line
    that names the hook's file and line. The trace goes to ``log.txt``. The failed hook is called once more, for ``on_end``.

    ``run`` is what the recipe receives (:class:`cookbook.run.Run`).
    """

    def on_start(self, run: object) -> None:
        """Before the first step, after a checkpoint to resume from has been loaded."""

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        """After every optimizer step, with the row that goes to ``metrics.jsonl``."""

    def on_checkpoint(self, run: object, checkpoint: Checkpoint) -> None:
        """After a checkpoint has been written."""

    def on_weight_sync(self, run: object, sampler: Sampler) -> None:
        """After the deployment has got new weights."""

    def on_eval(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_end(self, run: object, state: str) -> None:
        """At the end: ``finished``, ``interrupted`` or ``failed``."""


class HookCalls:
    """Calls the hooks of one run. ``failure`` is the first error that a hook raised; the run then ends at its next safe point.

    ``hooks`` is read at every call, so that a hook may add another one.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.failure: HookError | None = None
        self._hooks = hooks
        self._started: list[Hook] = []
        self._failed: set[int] = set()  # ids of hooks
        self._ending = False  # the run ends for another reason than a hook

    def start(self, run: object) -> None:
        """Raises HookError: a hook raised. The hooks after it are not called."""
        for hook in list(self._hooks):
            self._call(hook, "on_start", run)
            self.check()
            self._started.append(hook)

    def call(self, moment: str, *arguments: Any) -> None:
        """Calls the method ``moment`` of every hook that has not failed yet."""
        for hook in self._hooks:
            if id(hook) not in self._failed:
                self._call(hook, moment, *arguments)

    def end(self, run: object, state: str) -> None:
        """Calls ``on_end`` of every hook that was started, the last one first, whatever the others do.

        Raises:
            HookError: a hook raised now, and the run had not ended for another reason.
        """
        self._ending = state != "finished"
        for hook in reversed(self._started):
            self._call(hook, "on_end", run, "failed" if self.failure and state == "finished" else state)
        if state == "finished":
            self.check()

    def check(self) -> None:
        """Raises HookError: a hook has raised."""
        if self.failure is not None:
            raise self.failure

    def _call(self, hook: Hook, moment: str, *arguments: Any) -> None:
        try:
            getattr(hook, moment)(*arguments)
        except (Exception, SystemExit) as error:
            line = f"hook {type(hook).__name__}: {moment} raised {described(error)}"
            log.info("the trace of hook %s:", type(hook).__name__, exc_info=error)
            self._failed.add(id(hook))
            if self.failure is None and not self._ending:
                self.failure = HookError(line)
            else:  # the terminal shows another error as the reason why the run ended
                log.warning("%s", line)
