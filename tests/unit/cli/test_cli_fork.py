"""cookbook fork, diff and list."""

import sys
from pathlib import Path

import pytest
import yaml
from marks import rest_slow

from cookbook.cli import catalogue
from cookbook.cli.app import run
from cookbook.losses import LOSSES, loss_class


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Run in an empty folder, and forget the modules imported from it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name == "losses" or name.startswith("losses.")]:
        del sys.modules[name]


def files(folder: Path) -> list[str]:
    kept = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sorted(str(path.relative_to(folder)) for path in kept)


def test_a_forked_recipe_runs_unchanged(here, capsys):
    assert run(["fork", "grpo", "my_grpo"]) == 0
    assert capsys.readouterr().out == (
        "wrote recipes/my_grpo.py and conf/recipe/my_grpo.yaml\ntry: cookbook train recipe=my_grpo\n"
    )
    assert files(here) == ["conf/recipe/my_grpo.yaml", "recipes/my_grpo.py"]
    conf = Path("conf/recipe/my_grpo.yaml").read_text()
    assert conf.startswith("# @package _global_\n") and "\n# forked from grpo\n" in conf
    code = Path("recipes/my_grpo.py").read_text()
    assert 'name: str = "my_grpo"' in code and "conf/recipe/my_grpo.yaml" in code
    assert run(["train", "recipe=my_grpo", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["recipe"]["name"] == "my_grpo"


@pytest.mark.parametrize("name", rest_slow(["dpo", "grpo", "cross_entropy", "dapo"]))
def test_a_forked_loss_is_used_under_its_own_name(here, capsys, name):
    assert run(["fork", "loss", name, "my_loss"]) == 0
    assert "try: cookbook train recipe=... loss=my_loss\n" in capsys.readouterr().out
    assert files(here) == ["conf/loss/my_loss.yaml", "losses/my_loss.py"]
    recipe = {"dpo": "dpo", "cross_entropy": "sft"}.get(name, "grpo")
    assert run(["train", f"recipe={recipe}", "loss=my_loss", "--dry-run"]) == 0
    forked = yaml.safe_load(capsys.readouterr().out)["loss"]
    module, _, cls = forked.pop("_target_").rpartition(".")
    assert module == "losses.my_loss"
    assert getattr(sys.modules[module], cls).name == "my_loss"
    assert run(["train", f"recipe={recipe}", f"loss={name}", "--dry-run"]) == 0
    packaged = yaml.safe_load(capsys.readouterr().out)["loss"]
    del packaged["_target_"]
    assert forked == packaged


def test_every_built_in_loss_can_be_forked(capsys):
    for name in LOSSES:
        assert run(["fork", "loss", name, f"my_{name}"]) == 0
        code = Path(f"losses/my_{name}.py").read_text()
        assert f'name: ClassVar[str] = "my_{name}"' in code
        assert code.count(f'"my_{name}"') == 1


def test_diff_shows_what_was_changed_and_nothing_else(capsys):
    run(["fork", "sft", "mine"])
    capsys.readouterr()
    assert run(["diff", "mine"]) == 0
    assert capsys.readouterr().out == "mine is the same as sft\n"
    conf = Path("conf/recipe/mine.yaml")
    conf.write_text(conf.read_text().replace("  name: mine", "  name: mine  # hers"))
    code = Path("recipes/mine.py")
    code.write_text(code.read_text() + "# more\n")
    assert run(["diff", "mine"]) == 0
    out = capsys.readouterr().out
    changed = [line for line in out.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed[0] == "+# more"
    assert [line.split("#")[0].rstrip() for line in changed[1:]] == ["-  name: mine", "+  name: mine"]
    assert "\033" not in out
    assert "\033[32m+# more\033[0m" in catalogue.diff("recipe", "mine", color=True)
    code.unlink()
    assert run(["diff", "mine"]) == 0
    assert "-def train(run: Run) -> None:" in capsys.readouterr().out


def test_a_fork_of_a_fork(capsys):
    run(["fork", "sft", "first"])
    assert run(["fork", "first", "second"]) == 0
    conf = Path("conf/recipe/second.yaml").read_text()
    assert conf.count("forked from") == 1 and "# forked from first\n" in conf
    capsys.readouterr()
    run(["diff", "second"])
    assert capsys.readouterr().out == "second is the same as first\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grop", "mine"], "unknown recipe 'grop'. Did you mean 'grpo'? (choices: distill, dpo, grpo, kto, orpo, sft, taken)"),
        (["loss", "grop", "mine"], "unknown loss 'grop'. Did you mean 'grpo'? (choices: "),
        (["grpo", "My-Grpo"], "fork: invalid name 'My-Grpo'; use lowercase letters, digits and _, starting with a letter"),
        (["grpo", "../mine"], "fork: invalid name '../mine'; use"),
        (["grpo", "sft"], "fork: a recipe 'sft' already exists; choose another name"),
        (["grpo", "taken"], "fork: a recipe 'taken' already exists; choose another name"),
        (["grpo", "half"], "fork: recipes/half.py already exists; choose another name, or remove it"),
        (["grpo"], "expected 2 names, got 1; for example: cookbook fork grpo my_grpo"),
        (["taken", "mine"], "fork: conf/recipe/taken.yaml has no recipes/taken.py next to it"),
    ],
)
def test_a_fork_that_is_refused_writes_nothing(here, capsys, words, message):
    for path in ("conf/recipe/taken.yaml", "recipes/half.py"):
        (here / path).parent.mkdir(parents=True)
        (here / path).write_text("# mine\n")
    before = files(here)
    assert run(["fork", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1
    assert files(here) == before
    assert Path("recipes/half.py").read_text() == "# mine\n"


def test_a_folder_that_cannot_be_written(here, capsys):
    Path("conf").write_text("not a folder")
    assert run(["fork", "grpo", "mine"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: fork: cannot write conf/recipe/mine.yaml: ") and err.count("\n") == 1
    assert files(here) == ["conf"]  # the first file is taken back


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine"], "diff: conf/recipe/mine.yaml not found; cookbook fork writes it"),
        (["loss", "mine"], "diff: conf/loss/mine.yaml not found; cookbook fork writes it"),
        (["own"], "diff: conf/recipe/own.yaml has no line '# forked from NAME', so there is nothing to compare"),
        (["orphan"], "unknown recipe 'gone'. (choices: "),
    ],
)
def test_a_diff_that_cannot_be_made(capsys, words, message):
    for name, text in (("own", "# mine\n"), ("orphan", "# forked from gone\n")):
        Path("conf/recipe").mkdir(parents=True, exist_ok=True)
        Path(f"conf/recipe/{name}.yaml").write_text(text)
    assert run(["diff", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines() if line}


def test_list_names_what_there_is_and_whose_it_is(capsys):
    run(["fork", "grpo", "mine"])
    run(["fork", "loss", "dpo", "my_dpo"])
    capsys.readouterr()
    assert run(["list", "recipes"]) == 0
    got = rows(capsys.readouterr().out)
    assert got["grpo"][1] == "packaged" and got["mine"][1] == "user" and got["mine"][2] == "GRPO:"
    assert run(["list", "losses"]) == 0
    got = rows(capsys.readouterr().out)
    assert got["grpo"][:5] == ["grpo", "packaged", "token", "sum", "num_loss_tokens"]
    assert got["dr_grpo"][:5] == ["dr_grpo", "packaged", "token", "sum", "num_sequences"]
    assert got["my_dpo"][:4] == ["my_dpo", "user", "mean", "nothing"]
    assert set(LOSSES) <= set(got)
    assert run(["list"]) == 0
    out = capsys.readouterr().out
    assert {"tiny", "arithmetic", "number", "sft", "orpo"} <= set(rows(out))
    assert "forked from" not in out and "@package" not in out


@pytest.mark.parametrize("name", LOSSES)
def test_the_list_reads_of_a_packaged_loss_what_the_class_says(name):
    """The source of the class is read without an import, the bases included."""
    read, cls = catalogue._packaged_class(LOSSES[name]), loss_class(name)
    assert read is not None
    assert (read["reduction"], read["normalization"]) == (cls.reduction, cls.normalization)


def test_a_broken_file_does_not_break_the_list(capsys):
    Path("conf/loss").mkdir(parents=True)
    Path("conf/loss/broken.yaml").write_text("_target_: losses.gone.Mine\n")
    Path("conf/loss/torn.yaml").write_text("a: [1\n")
    Path("conf/loss/typo.yaml").write_text("_target_: cookbook.losses.dpo.DPOO\n")
    Path("conf/loss/empty.yaml").write_text("a: 1\n")
    assert run(["list", "losses"]) == 0
    out = capsys.readouterr().out
    assert "has no 'DPOO'" in out and "expected package.module.Class, got None" in out
    assert "unusable: " in out and "grpo" in out


def test_a_table_on_a_terminal(capsys):
    catalogue.print_list("recipes", table=True)
    out = capsys.readouterr().out
    assert "recipes" in out and "grpo" in out and "packaged" in out


def test_list_refuses_what_it_does_not_know(capsys):
    assert run(["list", "recipe"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
