"""Checks of an environment: what exact resume and a fair reward rely on, measured on episodes with made-up answers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cookbook.check.bench import CheckResult, State
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat
from cookbook.errors import ConfigError, DataError, shortened
from cookbook.sampling.environments.agent import AgentEnvironment
from cookbook.sampling.environments.config import EnvironmentConfig
from cookbook.sampling.environments.conversation import Conversation
from cookbook.sampling.environments.instance import Reply
from cookbook.sampling.environments.runner import EnvironmentRunner, EpisodeRunner, Failure
from cookbook.sampling.trajectory import Segment
from cookbook.types import JsonObject, Sample
from cookbook.utils.paths import packaged

# Rows that are played.
ROWS = 3
# Turns of an episode, if env.max_turns allows more.
MOST_TURNS = 20
# Answers of every episode, repeatedly; a call of each tool precedes them.
TEXTS = ("1", "yes", "", "a longer answer\nof two lines", "<tool_call>{broken</tool_call>")


@dataclass
class PlayedEpisode:
    """Result of an episode: the observations, why it ended, and the reward; ``slowest_s`` is its slowest call."""

    observations: list[object] = field(default_factory=list)
    ended: str = ""
    reward: float | None = None
    failure: str = ""
    slowest_s: float = 0.0
    num_turns: int = 0
    num_opponent_turns: int = 0
    opponent_moves: bool = False

    def facts(self) -> str:
        """All but the times."""
        return json.dumps([self.observations, self.ended, self.reward, self.failure], default=str)


RunnerFactory = Callable[[EnvironmentConfig, Renderer], EpisodeRunner]


def check_environment(config: EnvironmentConfig, rows: Sequence[Row], runner: RunnerFactory) -> list[CheckResult]:
    """Return the results of all checks, on an episode of each row. A failing environment gives failed checks, and no exception.

    Raises:
        ConfigError: the environment lacks a method of the contract.
    """
    # Every failure is shown here, and none ends the command.
    failed_episodes = config.failed_episodes
    config = dataclasses.replace(config, on_error="end")
    renderer = tiny_renderer()
    with contextlib.closing(runner(config, renderer)) as environment:
        environment.warns = False
        alone: list[PlayedEpisode] = []
        again: list[PlayedEpisode] = []
        together: list[PlayedEpisode] = []
        one_by_one = [[row] for row in rows]
        for played, parts in ((alone, one_by_one), (again, one_by_one), (together, [rows])):
            for part in parts:
                played += _interleaved(environment, renderer, part)
                failed = [(row.where, episode.failure) for row, episode in zip(rows, played, strict=False) if episode.failure]
                if failed:
                    # No further episode: each of them may hang, too, for env.timeout_s.
                    harm = f"such episodes {failed_episodes}"
                    return [CheckResult("plays", State.failed, ": ".join(failed[0]), harm, "fix the environment")]
    # The first call of a worker process waits for its start, which is not part of any time limit.
    slowest = max(min(first.slowest_s, other.slowest_s) for first, other in zip(alone, again, strict=True))
    return [
        CheckResult(
            "plays", State.passed, f"{len(rows)} episodes, ended by {', '.join(sorted({episode.ended for episode in alone}))}"
        ),
        _same("repeats", alone, again, "the same row, played twice", "an interrupted run would not continue as it was"),
        _same("independent", alone, together, "episodes played in turn", "episodes of one process would disturb each other"),
        _exact_tokens(config, alone, failed_episodes),
        *_repeated_prompts(rows, alone),
        _rewards([episode.reward for episode in alone], environment.contract.reward_range),
        _limits(config, max(episode.num_turns for episode in alone), slowest),
    ]


def _repeated_prompts(rows: Sequence[Row], played: Sequence[PlayedEpisode]) -> list[CheckResult]:
    """Say that first observations repeat the prompts of their rows, to whose end a run adds them; nothing if they do not."""
    for row, episode in zip(rows, played, strict=True):
        prompt, opening = row.values.get("prompt"), episode.observations[0] if episode.observations else None
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
            prompt = prompt[-1].get("content")
        if isinstance(prompt, str) and prompt.strip() and isinstance(opening, str) and prompt.strip() in opening:
            finding = f"the first observation repeats the row's prompt, {shortened(repr(prompt.strip()))}"
            harm = "a run adds the observation to the prompt, so the model reads it twice"
            return [CheckResult("prompt", State.failed, finding, harm, "return None from reset, or rename the column")]
    return []


def _rewards(rewards: Sequence[float | None], declared: tuple[float, float] | None) -> CheckResult:
    """Check the rewards of episodes, all finite, against the range that the class declares."""
    numbers = [reward for reward in rewards if reward is not None]
    if len(numbers) < len(rewards):
        return CheckResult("rewards", State.noted, "none, so the run needs reward=")
    if declared is None:
        return CheckResult("rewards", State.passed, f"{numbers}; the class declares no reward_range = (lowest, highest)")
    low, high = declared
    if outside := [reward for reward in numbers if not low <= reward <= high]:
        finding = f"{outside} are outside of the declared reward_range, {low:g} to {high:g}"
        return CheckResult(
            "rewards", State.failed, finding, "such episodes dominate their group", "fix get_reward or reward_range"
        )
    return CheckResult("rewards", State.passed, f"{numbers}, all from {low:g} to {high:g} as declared")


def _limits(config: EnvironmentConfig, num_turns: int, slowest_s: float) -> CheckResult:
    """Report the longest episode and the slowest call. An episode with a call that exceeds its limit fails the first check."""
    limit = "env.timeout_s=null sets none" if config.timeout_s is None else f"env.timeout_s={config.timeout_s:g}"
    turns = f"{num_turns} turns in the longest episode, env.max_turns={config.max_turns}"
    return CheckResult("limits", State.noted, f"{turns}; {slowest_s:.3f} s for the slowest call, {limit}")


def answers(environment: EpisodeRunner) -> list[str]:
    """Return the made-up answers of an episode, which are repeated."""
    calls = [json.dumps({"name": tool["function"]["name"], "arguments": {}}) for tool in environment.contract.tools]
    return [*(f"<tool_call>{call}</tool_call>" for call in calls), *TEXTS]


def _has_ended(episode: PlayedEpisode, config: EnvironmentConfig) -> bool:
    """Whether the episode has ended. One that has reached the limit of turns ends here, as in training."""
    limit = min(config.max_turns, MOST_TURNS)
    # An opponent that begins makes one turn more.
    has_turn = episode.num_opponent_turns <= limit if episode.opponent_moves else episode.num_turns < limit
    if not episode.ended and not has_turn:
        episode.ended = "max_turns" if limit == config.max_turns else "the check"
    return bool(episode.ended)


def play(environment: EpisodeRunner, renderer: Renderer, row: Row) -> PlayedEpisode:
    """Play one episode to its end."""
    return _interleaved(environment, renderer, [row])[0]


def _interleaved(environment: EpisodeRunner, renderer: Renderer, rows: Sequence[Row]) -> list[PlayedEpisode]:
    """Play the episodes of all rows in turn, an answer of each at a time."""
    episodes = [PlayedEpisode() for _ in rows]
    begun = []
    for episode, row in zip(episodes, rows, strict=True):
        started = time.monotonic()
        state, pending = environment.begin(row)
        _read(episode, pending.result(), started)
        begun.append(state)
    texts = answers(environment)
    for number in itertools.count():
        playing = [
            (episode, state)
            for episode, state in zip(episodes, begun, strict=True)
            if not _has_ended(episode, environment.config)
        ]
        if not playing:
            break
        for episode, state in playing:
            episode.num_turns += not episode.opponent_moves
            episode.num_opponent_turns += episode.opponent_moves
            started = time.monotonic()
            _read(episode, environment.act(state, _made_up(renderer, texts[number % len(texts)])).result(), started)
    for episode, state in zip(episodes, begun, strict=True):
        if not episode.failure:
            reward = environment.reward(state).result()
            if isinstance(reward, Failure):
                episode.failure = reward.message
            elif reward is not None:
                episode.reward = reward.value
        environment.end(state)
    return episodes


def _made_up(renderer: Renderer, text: str) -> Segment:
    tokens = [*renderer.encode(text), *renderer.answer_end]
    return Segment("model", tokens, text, [0.0] * len(tokens), "stop")


def _read(episode: PlayedEpisode, reply: Reply | Failure, started: float) -> None:
    episode.slowest_s = max(episode.slowest_s, time.monotonic() - started)
    if isinstance(reply, Failure):
        episode.ended, episode.failure = reply.ended, reply.message
        return
    episode.observations.append(reply.observation)
    episode.ended = "done" if reply.done else ""
    episode.opponent_moves = reply.opponent_moves


def _same(check: str, first: Sequence[PlayedEpisode], second: Sequence[PlayedEpisode], how: str, harm: str) -> CheckResult:
    for number, (episode, other) in enumerate(zip(first, second, strict=True)):
        if episode.facts() != other.facts():
            both = [episode.facts(), other.facts()]
            # Long observations are shown from shortly before their difference.
            differing = (place for place, (left, right) in enumerate(zip(*both, strict=False)) if left != right)
            start = max(next(differing, min(map(len, both))) - 200, 0)
            texts = " and ".join("..." * (start > 0) + shortened(facts[start:]) for facts in both)
            finding = f"{how}: episode {number} differs: {texts}"
            return CheckResult(
                check, State.failed, finding, harm, "draw from random.Random(seed), and keep no state outside of self"
            )
    return CheckResult(check, State.passed, f"{how}: the same observations and rewards")


def turn_tokens(config: EnvironmentConfig, prompts: Sequence[RenderedPrompt], renderer: Renderer) -> tuple[int, int]:
    """Return the tokens of the longest first observation and of the longest later one, played on the first prompts.

    The answers are made up. Tokens of the chat template around an observation count as its own.

    Raises:
        ConfigError: the environment fails.
    """
    config = dataclasses.replace(config, workers=0, timeout_s=None, on_error="end")
    first, later = 0, 0
    with contextlib.closing(EnvironmentRunner(config)) as environment:
        for prompt in prompts[:ROWS]:
            episode = play(environment, renderer, prompt.row)
            if episode.failure:
                raise ConfigError(f"env: {episode.failure}; fix the environment (cookbook check env)")
            opening, *observations = episode.observations
            try:
                conversation = Conversation(renderer, prompt, _observed(opening), config.contract.tools)
                first = max(first, len(conversation.tokens) - len(prompt.tokens))
                for observation in filter(None, observations):
                    answered = _continued(conversation, renderer, observation)
                    later = max(later, len(conversation.tokens) - len(answered))
            except DataError as error:
                raise ConfigError(f"env: an observation is refused: {error}; cookbook check env shows it") from None
    return first, later


def _continued(conversation: Conversation, renderer: Renderer, observation: object) -> list[int]:
    """Add a made-up answer and an observation. Return the tokens that the next turn has to begin with."""
    tokens = [*renderer.encode("answer"), *renderer.answer_end]
    begun = conversation.tokens + tokens
    conversation.add(Sample(tokens, [0.0] * len(tokens), "stop"))
    conversation.observe(_observed(observation) or "")
    return begun


def tiny_renderer() -> Renderer:
    """Return the renderer of the shipped model."""
    from transformers import AutoTokenizer

    return Renderer(AutoTokenizer.from_pretrained(packaged("data") / "tiny"))


def _exact_tokens(config: EnvironmentConfig, played: Sequence[PlayedEpisode], failed_episodes: str) -> CheckResult:
    """Check, with the tokenizer of the shipped model, that the tokens of each turn begin with those of the turn before."""
    if isinstance(config, AgentEnvironment):
        return CheckResult("tokens", State.skipped, "every call of a program is rendered as a whole; rollout/branches counts")
    renderer = tiny_renderer()
    try:
        return _turns_continue(config, played, renderer)
    except DataError as error:
        harm, remedy = f"such episodes {failed_episodes}", "return other text"
        return CheckResult("tokens", State.failed, f"an observation is refused: {error}", harm, remedy)


def _turns_continue(config: EnvironmentConfig, played: Sequence[PlayedEpisode], renderer: Renderer) -> CheckResult:
    """Return the result of a comparison of the tokens. Raises DataError: an observation cannot be rendered."""
    for episode in played:
        opening, *later = episode.observations
        conversation = Conversation(
            renderer, RenderedPrompt([], Row("", {}), "", "", Chat("", ())), _observed(opening), config.contract.tools
        )
        for observation in later:
            if observation is None:
                break
            begun = _continued(conversation, renderer, observation)
            if conversation.tokens[: len(begun)] != begun:
                finding = f"the turn after {shortened(repr(observation))} does not begin with the tokens of the turn before it"
                return CheckResult(
                    "tokens", State.failed, finding, "the episode becomes several sequences", "return plain text"
                )
    return CheckResult("tokens", State.passed, "every turn begins with the tokens of the turn before it")


def _observed(value: object) -> str | list[JsonObject] | None:
    return value if isinstance(value, str | list) else None
