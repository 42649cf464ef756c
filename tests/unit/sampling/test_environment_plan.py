"""Output of ``check config``, ``plan`` and ``check env`` for an environment, and environments that a file defines."""

from __future__ import annotations

import pytest
from runtools import here, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run

pytestmark = pytest.mark.usefixtures("here")

ECHO = """
class Echo:
    def reset(self, seed): return "x" * 10
    def step(self, text): return "y" * 20, 0.0
"""
# The chat template of the shipped model prints these around an observation; its tokens are bytes, and three marks.
OPENING = len("|user\n|\n|assistant\n")
LATER = len("\n") + OPENING


def facts(capsys, *words):
    """The lines of a command, by their first word."""
    assert run([*words]) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split(maxsplit=1)) == 2)


def test_check_config_describes_the_environment_in_place_of_data_that_are_not_read(capsys):
    write("echo.py", ECHO)
    said = facts(capsys, "check", "config", "recipe=grpo", "env=echo.py:Echo", "env.rows=30", "eval.limit=7")
    assert "data" not in said
    assert said["environment"] == (
        "PythonEnvironment, target=echo.py:Echo; answers text with text; up to 8 turns; numbered rows (env.rows): 30 rows; "
        "held out: 7 rows (eval.limit=7)"
    )
    assert said["reward"] == "the environment's; if it gives none, Number(answer_only=True, column='answer')"
    # Numbered rows are counted; the data are not read.
    assert (
        "30 rows"
        in facts(capsys, "check", "config", "recipe=grpo", "env=echo.py:Echo", "env.rows=30", "data=gsm8k")["environment"]
    )
    write("reads.py", ECHO.replace("seed", "prompt").replace("Echo", "Reads"))
    said = facts(capsys, "check", "config", "recipe=grpo", "env=reads.py:Reads")
    assert "prompts_train.jsonl" in said["data"] and said["environment"].endswith("up to 8 turns; plays the rows of the data")


@pytest.mark.slow
def test_plan_counts_the_tokens_of_all_turns(capsys):
    write("echo.py", ECHO)
    words = ["plan", "recipe=grpo", "env=echo.py:Echo", "env.max_turns=3", "rollout.max_tokens=16"]
    size = ["recipe.prompts_per_step=2", "recipe.group_size=4"]
    longest = OPENING + 10 + 3 * 16 + 2 * (LATER + 20)
    assert f"8 sequences of up to {longest} tokens, {8 * longest:,} in total" in facts(capsys, *words, *size)["step"]
    # The prompt of the row comes before the observation.
    write("reads.py", ECHO.replace("seed", "prompt").replace("Echo", "Reads"))
    words[2] = "env=reads.py:Reads"
    assert int(facts(capsys, *words, *size)["step"].split()[5]) > longest
    write("wrong.py", ECHO.replace('"x" * 10', "1 / 0").replace("Echo", "Wrong"))
    assert run(["plan", "recipe=grpo", "env=wrong.py:Wrong"]) == 2
    assert "error: env: reset raised ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_names_the_environment_of_an_evaluation(capsys):
    write("echo.py", ECHO)
    words = ["recipe.steps=1", "recipe.prompts_per_step=2", "recipe.group_size=2", "eval.limit=2", "env.max_turns=2"]
    assert train("recipe=grpo", "env=arithmetic", *words, "out=run") in (0, 2)
    capsys.readouterr()
    assert run(["eval", "run", "env=echo.py:Echo", "env.max_turns=1", "eval.limit=2"]) == 0
    assert "judged by the environment; if it gives no reward, by Number" in capsys.readouterr().out
    assert run(["eval", "run", "env=echo.py:None_"]) == 2
    assert "env.target: echo.py has no function 'None_'" in capsys.readouterr().err
