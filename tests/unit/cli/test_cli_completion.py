"""Completion by <TAB>, through the protocols of the three shells."""

import pytest

from cookbook.cli.app import run
from cookbook.cli.hydra.bridge import rejoin


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tab(monkeypatch, capsys):
    """Completions of a command line; in bash the last word is the one under the cursor."""

    def ask(shell: str, line: str) -> list[str]:
        monkeypatch.setenv("_COOKBOOK_COMPLETE", f"complete_{shell}")
        if shell == "bash":  # which splits words at =
            words = line.replace("=", " = ").split()
            words += [""] if line.endswith(" ") else []
            monkeypatch.setenv("COMP_WORDS", " ".join(words))
            monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        else:
            monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
            monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        with pytest.raises(SystemExit) as left:
            run([])
        assert left.value.code in (0, None)
        return capsys.readouterr().out.split("\n")[:-1]

    return ask


@pytest.mark.slow
def test_bash(tab):
    assert tab("bash", "cookbook train recipe=") == ["distill", "dpo", "grpo", "kto", "orpo", "sft"]
    assert tab("bash", "cookbook train recipe=gr") == ["grpo"]
    assert tab("bash", "cookbook train rec") == ["recipe.", "recipe="]
    assert tab("bash", "cookbook train recipe=sft loss.") == ["loss.normalization="]
    assert tab("bash", "cookbook train recipe=sft -m recipe.name=") == ["sft"]
    assert "optim." in tab("bash", "cookbook train recipe=grpo ")
    assert tab("bash", "cookbook fork or") == ["orpo"]


@pytest.mark.slow
def test_fish(tab):
    assert tab("fish", "cookbook train recipe=gr") == ["recipe=grpo"]
    assert tab("fish", "cookbook train recipe=sft loss.") == ["loss.normalization="]
    assert tab("fish", "cookbook train hydra/launch") == ["hydra/launcher="]


def test_zsh(tab):
    assert tab("zsh", "cookbook train recipe=gr") == ["_arguments '*: :((\"recipe=grpo\"))'"]


@pytest.mark.parametrize("line", ["nope=1 optim.", "optim.lr=[1 optim.", "recipe=grop loss."])
def test_a_line_that_makes_no_configuration_offers_nothing_and_says_nothing(tab, line):
    assert "".join(tab("fish", f"cookbook train {line}")) == ""


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "", ([], "")),
        (["recipe", "=", "grpo"], "", (["recipe=grpo"], "")),
        (["recipe", "="], "gr", ([], "recipe=")),
        (["recipe"], "", ([], "recipe=")),
        (["recipe=grpo"], "optim.lr=", (["recipe=grpo"], "")),
        (["a", "=", "1", "b", "=", "2", "c", "="], "3", (["a=1", "b=2"], "c=")),
        (["~reward"], "", (["~reward"], "")),
    ],
)
def test_rejoin(words, incomplete, expected):
    assert rejoin(words, incomplete) == expected
