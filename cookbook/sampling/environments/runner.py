"""Calls of environments, in this process or in workers. One that raises or hangs ends its own episode only."""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cookbook.data import DataConfig, RejectedRows, RenderedPrompt, Renderer, Row, datums
from cookbook.data.formats import Chat, Plain
from cookbook.errors import ConfigError, DataError, RolloutError
from cookbook.futures import done
from cookbook.sampling import workers
from cookbook.sampling.environments.config import EnvironmentConfig
from cookbook.sampling.environments.conversation import Conversation, Transcript
from cookbook.sampling.environments.instance import EarnedReward, Instances, Reply, called_method
from cookbook.sampling.environments.tool_calls import CallReader, Calls, token_reader
from cookbook.sampling.trajectory import Segment, Trajectory
from cookbook.sampling.workers import WorkerEndedError, WorkerProcess, WorkerStartError, WorkerTimeoutError
from cookbook.types import JsonObject

log = logging.getLogger("cookbook")

T = TypeVar("T")
# Parameters of ``reset`` that every episode has.
NAMED = frozenset({"seed"})
# Seconds that the environments of the last episodes have to close.
CLOSE_S = 5.0
# Held-out rows of an environment that reads no data, with eval.limit=null.
NUM_EVAL = 200
# Seconds that the rounds of a step may wait for slow environments. After a longer wait, one line names env.lockstep.
LONG_WAIT_S = 10.0
# Share of a step's episodes that may end by an error before a warning.
LOST_SHARE = 0.1
HANDLER = "cookbook.sampling.environments.instance:handler"


@dataclass(frozen=True)
class Failure:
    """Why an environment gave no answer. ``ended`` is ``error`` or ``timeout``."""

    message: str
    ended: str = "error"


@dataclass(frozen=True)
class Pending(Generic[T]):
    """An answer of an environment that may not have arrived yet."""

    future: Future[JsonObject]
    read: Callable[[JsonObject], T | Failure]

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> T | Failure:
        """Wait for the answer and return it."""
        return self.read(self.future.result())


@dataclass(eq=False)
class Episode:
    """One attempt at a row in an environment.

    A worker process that is stopped takes the state of all its episodes with it. ``acted`` are the calls so far, which replay
    an episode in the next process; ``process`` is the start of the process that has the state. ``conversation`` is the current
    one of ``conversations``, by whether the opponent moves.
    """

    number: int
    row: Row
    acted: list[tuple[str, list[Any]]] = field(default_factory=list)
    process: int = 0
    conversation: Conversation | None = None
    conversations: dict[bool, Conversation] = field(default_factory=dict)


class EpisodeRunner:
    """Plays episodes.

    ``limit``: the largest number of episodes at a time; None: no limit. ``warns``: whether failures are logged as warnings.

    Raises:
        ConfigError: the environment lacks a method.
    """

    limit: int | None = None
    warns = True
    # Configuration of a reward function that gets environments, as JSON; and finished optimizer steps, for that function.
    grader: str | None = None
    step = 0
    # Whether the episodes of a row have to begin with the same observation. The first message of a program may have a time.
    compares_openings = True

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self.contract = config.contract
        self._numbers = itertools.count()
        self._said: set[str] = set()
        # Whether completed episodes have had a reward.
        self._rewarded: set[bool] = set()

    def begin(self, row: Row) -> tuple[Episode, Pending[Reply]]:
        """Begin an episode, and return it with the first observation. All episodes of a row have the same seed."""
        raise NotImplementedError

    def observe(self, episode: Episode, prompt: RenderedPrompt, renderer: Renderer, reply: Reply) -> Transcript:
        """Add an observation to the tokens of the episode, and return them. Raises DataError: it cannot be rendered."""
        raise NotImplementedError

    def act(self, episode: Episode, turn: Segment) -> Pending[Reply]:
        """Return the answer to a completion."""
        raise NotImplementedError

    def unreadable(self, episode: Episode, error: DataError) -> None:
        """Record a prompt that cannot be sampled. Raises RolloutError: ``env.on_error=fail``."""
        self._failure(episode, {"failure": f"the next prompt is refused: {error}"})

    def reward(self, episode: Episode) -> Pending[EarnedReward | None]:
        """Return the reward of the episode, None if the environment gives none."""
        raise NotImplementedError

    def end(self, episode: Episode) -> None:
        """Drop the state of an episode."""
        raise NotImplementedError

    def close(self) -> None:
        """End all episodes."""
        raise NotImplementedError

    def check_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise ConfigError if the environment gives a reward in some of its episodes only: they would not be comparable."""
        self._rewarded |= {
            trajectory.reward is not None for trajectory in trajectories if not trajectory.has_failed and trajectory.turns
        }
        if len(self._rewarded) == 2:
            raise ConfigError(
                "env: some episodes had a reward of the environment, and others none; return (observation, reward) from every "
                "step, with 0.0 where nothing is earned, or define get_reward"
            )

    def valid(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes to learn from and to evaluate.

        With ``env.on_error=drop``, those that have ended by an error are left out: their reward would be that of the failure,
        not of the model. So are episodes without a completion and without a reward, which another player has ended.
        """
        if self.config.on_error == "end":
            return list(trajectories)
        return [
            trajectory
            for trajectory in trajectories
            if not (trajectory.has_failed or (trajectory.reward is None and not trajectory.turns))
        ]

    def report_errors(self, num_left_out: int, num_episodes: int, kind: str) -> None:
        """Say once that many episodes of a step or an evaluation, the ``kind``, were left out.

        Raises:
            RolloutError: all episodes were left out, so that there is nothing to learn from or to measure.
        """
        if not num_left_out:
            return
        if num_left_out == num_episodes:
            raise RolloutError(
                f"env: all {num_episodes} episodes of the {kind} have ended by an error; log.txt has the reasons; fix the "
                "environment (cookbook check env), and run the same command to resume"
            )
        if num_left_out > LOST_SHARE * num_episodes and "lost" not in self._said:
            self._said.add("lost")
            log.warning(
                "env: %d of %d episodes of the %s have ended by an error and are left out, so it has learned or measured "
                "from the others only; log.txt has the reasons, and env.timeout_s and env.workers may help",
                num_left_out,
                num_episodes,
                kind,
            )

    def report_wait(self, waited_s: float) -> None:
        """Say once that the rounds of a step have waited long for slow answers.

        ``waited_s``: seconds by which the later half of the answers took longer than the earlier half.
        """
        if waited_s >= LONG_WAIT_S and "wait" not in self._said:
            self._said.add("wait")
            remedy = "with env.lockstep=false the other episodes continue, but runs no longer repeat bit for bit"
            log.warning("env: the rounds of a step have waited %.0f s for slow environments; %s", waited_s, remedy)

    def _failure(self, episode: Episode, answer: JsonObject) -> Failure:
        """Return the failure, and say it once.

        Raises:
            RolloutError: every episode would fail, or ``env.on_error=fail``.
        """
        message = f"{episode.row.where}: env: {answer['failure']}"
        if answer.get("trace"):
            # The terminal shows one line.
            log.info("%s: the environment's own trace\n%s", episode.row.where, answer["trace"])
        if answer.get("fatal"):
            raise RolloutError(message)
        if self.config.on_error == "fail":
            raise RolloutError(f"{message}; fix the environment, or set env.on_error=drop")
        if self.warns and answer["failure"] not in self._said:
            self._said.add(answer["failure"])
            remedy = "env/errors counts such episodes, and env.on_error=fail stops the run"
            log.warning("%s; such episodes %s; %s", message, self.config.failed_episodes, remedy)
        return Failure(answer["failure"], answer.get("ended", "error"))


class EnvironmentRunner(EpisodeRunner):
    """Plays episodes of an environment in Python.

    Raises:
        ConfigError: an environment cannot be constructed, or lacks a method.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self._here = Instances(config)
        configuration = workers.configuration(config, "env") if config.workers else b""
        # Calls of one episode go to one process, and each process has a thread that waits for it.
        self._processes = [WorkerProcess(HANDLER, configuration, config.timeout_s) for _ in range(config.workers)]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="env") for _ in self._processes]
        self._closing: list[tuple[Episode, Future[JsonObject]]] = []
        # The reader of calls, once the first completion has come.
        self._reader: tuple[CallReader | None] | None = None

    def begin(self, row: Row) -> tuple[Episode, Pending[Reply]]:
        """Begin an episode, and return it with the first observation. All episodes of a row have the same seed."""
        episode = Episode(next(self._numbers), row)
        return episode, self._pending(episode, "reset", [row.values, seed_of(row)], _reply)

    def observe(self, episode: Episode, prompt: RenderedPrompt, renderer: Renderer, reply: Reply) -> Transcript:
        """Add an observation to the tokens of the episode, and return them."""
        conversation = episode.conversations.get(reply.opponent_moves)
        if conversation is None:
            conversation = Conversation(renderer, prompt, reply.observation, self.contract.tools)
            if renderer.max_length is not None and (length := len(conversation.tokens)) >= renderer.max_length:
                raise DataError(f"it has {length} tokens, and the context {renderer.max_length}; return a shorter observation")
            episode.conversations[reply.opponent_moves] = conversation
        else:
            conversation.observe(reply.observation or "")
        episode.conversation = conversation
        return conversation

    def act(self, episode: Episode, turn: Segment) -> Pending[Reply]:
        """Return the answer to a completion."""
        # Tools are not called in reasoning, which the prompt may have opened.
        text = turn.opened + turn.text if self.contract.tools else turn.text
        return self._pending(episode, "act", [text, self._calls(episode, turn)], _reply)

    def reward(self, episode: Episode) -> Pending[EarnedReward | None]:
        """Return the reward of the episode, None if the environment gives none."""
        ended: list[Any] = []
        if self.contract.reward_arguments or self.grader is not None:
            own = episode.conversations.get(False)
            trajectory = Trajectory(own.branches if own is not None else (), "done")
            ended = [{"text": trajectory.text, "trajectory": trajectory.messages()}]
            if self.grader is not None:
                opened = [turn.opened for turn in trajectory.turns]
                ended[0] |= {"grader": self.grader, "row": dict(episode.row.values), "step": self.step, "opened": opened}
        return self._pending(episode, "reward", ended, lambda result: None if result is None else EarnedReward(**result))

    def end(self, episode: Episode) -> None:
        """Drop the state of an episode."""
        self._closing = [(closing, future) for closing, future in self._closing if not self._is_closed(closing, future)]
        self._closing.append((episode, self._submit(episode, "close", [])))

    def close(self) -> None:
        """Close the last episodes, if that takes no longer than ``CLOSE_S``, and stop the processes and their current calls."""
        wait([future for _, future in self._closing], CLOSE_S)
        for episode, future in self._closing:
            self._is_closed(episode, future)
        self._here.close()
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.shutdown(wait=False, cancel_futures=True)
            process.retire()
            thread.shutdown()

    def _is_closed(self, episode: Episode, future: Future[JsonObject]) -> bool:
        """Whether the episode is closed; a failure is logged once."""
        if not future.done():
            return False
        answer = future.result()
        if "failure" in answer and answer["failure"] not in self._said:
            self._said.add(answer["failure"])
            log.warning("%s: env: %s", episode.row.where, answer["failure"])
        return True

    def _calls(self, episode: Episode, turn: Segment) -> Calls | None:
        """Return the calls of tools in the tokens of a completion; None if the environment reads them from its text."""
        conversation = episode.conversation
        if not self.contract.tools or conversation is None:
            return None
        if self._reader is None:
            self._reader = (token_reader(conversation.renderer.tokenizer, self.contract.tools),)
            if not conversation.renderer.prints_tools:
                log.info("env: the chat template does not print tools; the first observation describes them")
        [read] = self._reader
        prompt = conversation.tokens[: len(conversation.tokens) - len(turn.tokens)]
        return read(prompt, turn.tokens) if read is not None else None

    def _pending(self, episode: Episode, method: str, arguments: list[Any], read: Callable[[Any], T]) -> Pending[T]:
        def checked(answer: JsonObject) -> T | Failure:
            return self._failure(episode, answer) if "failure" in answer else read(answer["result"])

        return Pending(self._submit(episode, method, arguments), checked)

    def _submit(self, episode: Episode, method: str, arguments: list[Any]) -> Future[JsonObject]:
        """Start a call. Without workers it is made immediately."""
        if not self._processes:
            return done(self._here((episode.number, method, arguments)))
        worker = episode.number % len(self._processes)
        return self._threads[worker].submit(self._call, self._processes[worker], episode, method, arguments)

    def _call(self, process: WorkerProcess, episode: Episode, method: str, arguments: list[Any]) -> JsonObject:
        name = called_method(method, self.contract)
        timeout = f"{self.config.timeout_s:g} s" if self.config.timeout_s else ""
        try:
            process.start()
            if method == "close" and episode.process != process.starts:
                return {"result": None}
            if episode.acted and episode.process != process.starts:
                for call in episode.acted:
                    process.call([episode.number, *call])
            answer: JsonObject = process.call([episode.number, method, arguments])
            episode.process = process.starts
            if method in ("reset", "act"):
                episode.acted.append((method, arguments))
            return answer
        except TypeError as error:
            remedy = "set env.workers=0 and env.timeout_s=null"
            return {"failure": f"the row cannot be sent to a worker ({error}); {remedy}", "fatal": True}
        except WorkerStartError as error:
            remedy = "its output is above; fix env.target, or set env.workers=0 and env.timeout_s=null"
            return {"failure": f"a worker process cannot start ({error}); {remedy}", "fatal": True}
        except WorkerTimeoutError:
            remedy = "fix the environment, or raise env.timeout_s"
            return {"failure": f"{name} has not returned after {timeout}; {remedy}", "ended": "timeout"}
        except WorkerEndedError as error:
            return {"failure": f"{name} ended its process ({error}); fix the environment"}


def seed_of(row: Row) -> int:
    """Return the seed of the row's episodes. It ignores the folder: a run that was moved resumes with the same seeds."""
    return zlib.crc32(row.where.rpartition("/")[2].encode())


def _reply(result: JsonObject) -> Reply:
    return Reply(**result)


def numbered_rows(config: EnvironmentConfig, which: str, seed: int, num_eval: int | None) -> list[Row]:
    """Return the rows of an environment that reads no data: an index and a seed each. Held-out rows follow the others."""
    first, count = (0, config.rows) if which == "train" else (config.rows, NUM_EVAL if num_eval is None else num_eval)
    return [Row(f"env[{which}]:{i}", {"index": i, "seed": seed * 1_000_003 + i}) for i in range(first, first + count)]


def prompts(
    config: EnvironmentConfig, rows: Sequence[Row], renderer: Renderer, data: DataConfig, refusals: RejectedRows | None = None
) -> Sequence[RenderedPrompt]:
    """Return what the episodes of each row begin with, before the first observation; empty for rows without a prompt.

    Raises:
        DataError: as :func:`cookbook.data.datums.prompts`.
        ConfigError: the rows lack a column that ``reset`` needs, or tools have no chat template to describe them.
    """
    if rows and (missing := config.contract.required - NAMED - rows[0].values.keys()):
        raise ConfigError(
            f"env: reset needs the column {', '.join(sorted(missing))}, and {rows[0].where} has "
            f"{', '.join(map(str, rows[0].values))}; rename the parameter of reset, or add the column to the data"
        )
    columns = {data.columns.prompt, data.columns.messages, data.columns.chosen}
    if any(columns & row.values.keys() for row in rows):
        rendered = datums.prompts(rows, renderer, data, 0, refusals)
        if config.contract.tools and rendered and isinstance(rendered[0].example, Plain):
            raise ConfigError(
                "env: its tools are described by the chat template, and the prompts are plain text; set data.chat=true"
            )
        return rendered
    if config.contract.tools and not config.chat:
        raise ConfigError("env.chat=false: the environment has tools, which only a chat template describes; set env.chat=true")
    examples = (Chat(row.where, ()) if config.chat else Plain(row.where, "") for row in rows)
    return [RenderedPrompt([], row, "", "", example) for row, example in zip(rows, examples, strict=True)]
