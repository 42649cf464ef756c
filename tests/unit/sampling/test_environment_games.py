"""Games of textarena: those for one player start, repeat and do not disturb each other; an opponent of the user's moves."""

from __future__ import annotations

import random
import re
import sys

import pytest
from places import ROOT
from runtools import here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.errors import ConfigError
from cookbook.sampling.environments import TextArena

MOVE = re.compile(r"\[[^\[\]]*\]")
DOCS = ROOT / "docs/guide/environments.md"
# As in the documentation.
GAMES = re.findall(
    r"\w+",
    "2048, Bandit, Blackjack, Crosswords, FifteenPuzzle, FrozenLake, GuessTheNumber, LightsOut, LogicPuzzle, Mastermind, "
    "Minesweeper, PegJump, RushHour, Secretary, Set, Sokoban, Sudoku, ThreeCardMonte, TowerOfHanoi",
)
TWO_PLAYERS = re.findall(r"\w+", "Alquerque Battleship ConnectFour Crusade KuhnPoker Nim Othello PigDice SimpleTak TicTacToe")
OPPONENT = """
import random, re

def opponent(seen):
    return random.choice(re.findall(r"'(\\[.*?\\])'", seen.splitlines()[-1]) or ["[0 1]"])
"""

pytestmark = pytest.mark.usefixtures("here")


def needs_textarena():
    return pytest.importorskip("textarena", reason="the extra textarena is not installed")


def moved(game, observation, numbers):
    """One move, drawn from what the game shows in brackets."""
    choices = MOVE.findall(observation.splitlines()[-1]) or MOVE.findall(observation) or ["[1]"]
    return game.step(numbers.choice(choices))


def played(config, seeds, turns=12):
    """Games of all seeds, a move of each at a time: what each says, and its reward."""
    games = [config.make() for _ in seeds]
    said = [[game.reset(seed=seed)] for game, seed in zip(games, seeds, strict=True)]
    draws = [random.Random(seed) for seed in seeds]
    for _ in range(turns):
        for game, texts, numbers in zip(games, said, draws, strict=True):
            if texts[-1] is not None:
                texts.append(moved(game, texts[-1], numbers))
    return [(*texts, game.get_reward()) for game, texts in zip(games, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GAMES, *TWO_PLAYERS])
def test_a_game_repeats_and_disturbs_no_other(name):
    needs_textarena()
    write("other.py", OPPONENT)
    opponent = "other.py:opponent" if name in TWO_PLAYERS else None
    config = TextArena(game=f"{name}-v0", opponent=opponent)
    # The games do not change the process's own generator.
    random.seed(5)
    expected = random.random()
    random.seed(5)
    alone = [*played(config, [3]), *played(config, [4])]
    assert played(config, [3, 4]) == alone and random.random() == expected
    assert all(-1.0 <= reward <= 1.0 for *_, reward in alone)


@pytest.mark.slow
def test_the_model_sees_new_messages_only_and_never_its_own_move():
    needs_textarena()
    game = TextArena(game="GuessTheNumber-v0", options={"min_number": 9, "max_number": 11}).make()
    assert "between 9 and 11" in game.reset(seed=0)
    hints = [game.step(f"[{number}]") for number in (9, 10, 11)]
    # Seed 0 draws 10 or 11: the first guess is too low.
    assert hints[0] == "The target number is higher." and hints[-1] is None
    assert all(hint is None or ("between" not in hint and "[" not in hint) for hint in hints)
    assert game.get_reward() == 1.0


@pytest.mark.slow
def test_an_opponent_moves_between_two_moves_of_the_model():
    needs_textarena()
    # The opponent takes the last free square, and the model the first row.
    documented = DOCS.read_text(encoding="utf-8").split("```python\n")[2].split("```")[0]
    write("last.py", documented.replace("random.choice(", "max("))
    game = TextArena(game="TicTacToe-v0", opponent="last.py:opponent").make()
    assert "You are Player 0" in game.reset(seed=0)
    assert "[Player 1] [8]" in game.step("[0]") and "[Player 1] [7]" in game.step("[1]")
    assert game.get_reward() == 0.0
    assert game.step("[2]") is None and game.get_reward() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_PLAYERS)
def test_in_self_play_the_model_moves_for_both_sides(name):
    """The trained side alternates with the seed. Each observation is for the player whose turn it is."""
    needs_textarena()
    config = TextArena(game=f"{name}-v0", opponent="self")
    assert played(config, [3, 4]) == [*played(config, [3]), *played(config, [4])]
    for seed in (0, 1):
        game, numbers, turns = config.make(), random.Random(0), set()
        said = game.reset(seed=seed)
        for _ in range(6):
            turns.add(game.opponent_moves)
            if said is not None:
                assert game.opponent_moves == (game._game.state.current_player_id != seed)
                said = moved(game, said, numbers)
        assert turns == {True, False}


@pytest.mark.slow
def test_a_game_of_two_sides_is_won_by_one():
    needs_textarena()
    for seed, reward in ((0, 1.0), (1, -1.0)):
        game = TextArena(game="TicTacToe-v0", opponent="self").make()
        game.reset(seed=seed)
        sides = [(game.step(move), game.opponent_moves)[1] for move in ("[0]", "[8]", "[1]", "[7]")]
        assert sides == [seed == 0, seed == 1] * 2 and game.step("[2]") is None and game.get_reward() == reward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "GuesTheNumber"}, "env.game: textarena has no game 'GuesTheNumber'. Did you mean 'GuessTheNumber-v0'?"),
        ({"game": "TicTacToe-v0"}, "env.opponent: TicTacToe-v0 is for two players; set env.opponent=FILE.py:FUNCTION"),
        ({"game": "GuessTheNumber-v0", "opponent": "a.py:b"}, "env.opponent: GuessTheNumber-v0 is for one player"),
        ({"game": "GuessTheNumber-v0", "opponent": "self"}, "env.opponent: GuessTheNumber-v0 is for one player"),
        ({"game": "GuessTheNumber-v0", "options": {"most": 3}}, "unexpected keyword argument 'most'"),
        (
            {"game": "SecretMafia-v0"},
            "env.game: SecretMafia-v0 does not start for one or two players (AssertionError: Player count",
        ),
        ({"game": "MarketEntryGame-v0"}, "does not start for one or two players (it is for more players)"),
    ],
)
def test_games_that_cannot_be_played(options, message):
    needs_textarena()
    with pytest.raises(ConfigError, match=re.escape(message)):
        TextArena(**options)


@pytest.mark.slow
def test_a_run_in_a_game():
    needs_textarena()
    assert (
        run(["check", "env", "textarena", "game=GuessTheNumber-v0", "+options.max_number=9", "workers=0", "timeout_s=null"])
        == 0
    )
    words = ["env=textarena", "env.game=GuessTheNumber-v0", "env.workers=0", "env.timeout_s=null", "env.max_turns=3"]
    size = ["recipe.steps=2", "recipe.prompts_per_step=2", "recipe.group_size=2", "eval.limit=2"]
    assert train("recipe=grpo", *words, *size, "out=run") in (0, 2)
    assert rows("run")[-1]["env/errors"] == 0.0 and rows("run")[-1]["rollout/turns_max"] > 1


@pytest.mark.slow
def test_a_run_against_itself_is_evaluated_against_an_opponent(capsys):
    needs_textarena()
    write("other.py", OPPONENT)
    game = ["env=textarena", "env.game=TicTacToe-v0", "env.workers=0", "env.timeout_s=null", "env.max_turns=3"]
    size = ["recipe.steps=2", "recipe.prompts_per_step=2", "recipe.group_size=2", "eval.limit=2", "rollout.max_tokens=8"]
    assert train("recipe=grpo", *game, "env.opponent=self", *size, "out=run") in (0, 2)
    assert rows("run")[-1]["env/errors"] == 0.0
    capsys.readouterr()
    assert run(["eval", "run", *game, "env.opponent=other.py:opponent"]) == 0
    assert "eval/reward" in capsys.readouterr().out


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "textarena", None)
    assert run(["check", "env", "textarena", "game=GuessTheNumber-v0"]) == 2
    assert "pip install 'post-training-cookbook[textarena]'" in capsys.readouterr().err


def test_the_documentation_lists_the_games():
    text = " ".join(DOCS.read_text(encoding="utf-8").split())
    assert f"start without a download: {', '.join(GAMES)}." in text
