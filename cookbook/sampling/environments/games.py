"""Games of the package textarena: for one player, or for two, against the user's own opponent or the model itself."""

from __future__ import annotations

import contextlib
import functools
import random
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cookbook.config import python_file
from cookbook.errors import ConfigError, described
from cookbook.sampling.environments.config import EnvironmentConfig, digest_of
from cookbook.utils.suggest import did_you_mean

Opponent = Callable[[str], str]
"""Function of the user that returns the other player's move; its argument is all that this player has seen."""

# Value of env.opponent: the model makes the moves of both players.
SELF = "self"
# Variants of a game that repeat earlier messages in every observation, or pass them as a list.
VARIANTS = ("-train", "-raw")
# Characters of a game's own error that a message shows: some print a page.
LONGEST_REASON = 200


@dataclass(frozen=True, kw_only=True)
class TextArena(EnvironmentConfig):
    """A game of the package textarena, by its name, with its own options. The reward is the game's, from -1 to 1.

    The model gets the messages of the game since its last move. A game for two players needs an ``opponent``:
    ``file.py:function``, or ``self``. A game that is not over after ``max_turns`` moves of the model gives 0.

    Raises:
        ConfigError: the package is not installed, or the game is unknown, does not start here, or is for other players.

    Source: Guertler et al. 2025, "TextArena", arXiv:2504.11442.
    """

    game: str
    options: dict[str, Any] = field(default_factory=dict)
    opponent: str | None = None
    max_turns: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_opponent = self._num_players > 1
        if needs_opponent and self.opponent is None:
            raise ConfigError(
                f"env.opponent: {self.game} is for two players; set env.opponent=FILE.py:FUNCTION, a function that gets the "
                "text that the other player has seen, and returns its move, or env.opponent=self"
            )
        if not needs_opponent and self.opponent is not None:
            raise ConfigError(f"env.opponent: {self.game} is for one player; drop env.opponent")
        _ = self._opponent

    def make(self) -> object:
        return Game(self._start, self._num_players, self._opponent)

    def fingerprint(self) -> str:
        return super().fingerprint() + (digest_of(self.opponent) if self.opponent and self._opponent else "")

    @functools.cached_property
    def _opponent(self) -> Opponent | None:
        if self.opponent is None or self.opponent == SELF:
            return None
        opponent: Opponent = python_file.named(self.opponent, "env.opponent", signature="(observation)")
        return opponent

    @functools.cached_property
    def _start(self) -> Callable[[int, int], Any]:
        """Function that starts a game for a number of players with a seed."""
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise ConfigError(
                f"env: textarena cannot be imported ({error}); pip install 'post-training-cookbook[textarena]'"
            ) from None
        games = [name for name in ENV_REGISTRY if not name.endswith(VARIANTS)]
        if self.game not in games:
            hint = did_you_mean(self.game, games)
            raise ConfigError(
                f"env.game: textarena has no game {self.game!r}.{hint} docs/guide/environments.md lists those that start"
            )
        # Such a wrapper completes a move, for example by brackets. Those of observations repeat the whole game every turn.
        wrappers = [
            wrapper
            for wrapper in ENV_REGISTRY[self.game].default_wrappers or ()
            if issubclass(wrapper, textarena.ActionWrapper)
        ]

        def start(num_players: int, seed: int) -> Any:
            game = textarena.make(f"{self.game}-raw", **self.options)
            for wrapper in wrappers:
                game = wrapper(game)
            game.reset(num_players=num_players, seed=seed)
            return game

        return start

    @functools.cached_property
    def _num_players(self) -> int:
        """1 or 2. A game is started to find the number, which also shows whether the game starts here."""
        start = self._start
        import textarena

        reasons = []
        for num_players, state in enumerate((textarena.SinglePlayerState, textarena.TwoPlayerState), 1):
            try:
                with _Draws(0).used():
                    if isinstance(start(num_players, 0).state, state):
                        return num_players
            except Exception as error:  # noqa: BLE001 - the game is third-party code
                reasons.append(textwrap.shorten(described(error), LONGEST_REASON))
        # The wrong number of players is a reason only if there is no other.
        reasons.sort(key=lambda reason: "player" in reason)
        reason = reasons[0] if reasons else "it is for more players"
        raise ConfigError(
            f"env.game: {self.game} does not start for one or two players ({reason}); choose another game, or fix env.options"
        )


class _Draws:
    """A state of Python's shared generator, from which all games draw. Each game has its own, so that games repeat."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use this state inside the block, and restore the process's own state after it."""
        shared = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(shared)


class Game:
    """One game of textarena as an environment.

    Without an opponent, the model plays itself: its trained side is the first player in games of an even seed, else the second.
    """

    reward_range = (-1.0, 1.0)
    # Read after each call: whether the observation is for the side that is not trained.
    opponent_moves = False

    def __init__(self, start: Callable[[int, int], Any], num_players: int, opponent: Opponent | None) -> None:
        self._start = start
        self._num_players = num_players
        self._opponent = opponent
        # All messages to the opponent.
        self._seen: list[str] = []
        self._is_over = False

    def reset(self, seed: int) -> str:
        self._draws = _Draws(seed)
        self._side = seed % 2 if self._num_players > 1 and self._opponent is None else 0
        with self._draws.used():
            self._game = self._start(self._num_players, seed)
            observation = self._until_the_model_moves()
        if observation is None:
            raise ValueError("the opponent has ended the game before the first move of the model; fix env.opponent")
        return observation

    def step(self, text: str) -> str | None:
        with self._draws.used():
            self._is_over, _ = self._game.step(text)
            return self._until_the_model_moves()

    def get_reward(self) -> float:
        return float(self._game.close()[0][self._side]) if self._is_over else 0.0

    def _until_the_model_moves(self) -> str | None:
        """Make the moves of an opponent in Python. Return the new messages to the model, or None if the game is over."""
        while not self._is_over:
            player, messages = self._game.get_observation()
            said = [self._shown(author, text) for author, text, kind in messages if not self._is_own(player, author, kind)]
            if player == self._side or self._opponent is None:
                self.opponent_moves = player != self._side
                return "\n".join(said)
            self._seen += said
            self._is_over, _ = self._game.step(self._opponent("\n".join(self._seen)))
        return None

    def _is_own(self, player: int, author: int, kind: Enum) -> bool:
        """Whether a message repeats the player's own move. Games for one player do not always name its author."""
        return kind.name == "PLAYER_ACTION" and (author == player or self._num_players == 1)

    def _shown(self, author: int, text: str) -> str:
        return text if author < 0 else f"[{self._game.state.role_mapping.get(author, f'Player {author}')}] {text}"
