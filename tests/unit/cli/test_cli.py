"""The command as it is typed: what it prints, what it runs, what it answers to a slip, and what it leaves behind."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import yaml
from marks import rest_slow

import cookbook
from cookbook.cli.app import run
from cookbook.cli.hydra.bridge import ComposeRequest, show
from cookbook.cli.hydra.bridge import run as run_job
from cookbook.config.nodes import build
from cookbook.errors import ConfigError, CookbookError
from cookbook.utils import paths
from cookbook.utils.signals import Interrupted

CONF = paths.packaged("conf")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test runs in an empty folder, without modules of another test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        origin = str(getattr(sys.modules[name], "__file__", None) or list(getattr(sys.modules[name], "__path__", "")))
        if str(tmp_path) in origin:
            del sys.modules[name]


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def left_behind(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def job_that_notes(seen):
    def job(cfg, overrides):
        seen.append((build(cfg.optim, "optim").lr, overrides))

    return job


# Printing


def test_help_version_and_no_arguments(capsys):
    assert run(["--help"]) == 0
    assert "Run a recipe" in capsys.readouterr().out
    assert run([]) == 0
    assert "Usage: cookbook" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"cookbook {cookbook.__version__}\n"
    assert run(["train", "--help"]) == 0
    assert "  cookbook train recipe=grpo optim.lr=1e-5,1e-6 -m   one run for each value\n" in capsys.readouterr().out


def test_cfg_prints_yaml_that_can_be_read_back(capsys, here):
    assert run(["train", "--cfg", "job", "recipe=sft", "optim.lr=3e-5"]) == 0
    cfg = yaml.safe_load(capsys.readouterr().out)
    assert cfg["optim"]["lr"] == pytest.approx(3e-5, rel=0)
    assert cfg["recipe"]["name"] == "sft" and "hydra" not in cfg
    assert cfg["model"]["name"] == "${cookbook:data}/tiny"
    assert run(["train", "--cfg", "job", "--resolve", "-p", "model"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["name"] == f"{paths.packaged('data')}/tiny"
    assert run(["train", "--cfg", "job", "-p", "optim.lr", "optim.lr=7"]) == 0
    assert capsys.readouterr().out == "7\n"
    assert left_behind(here) == []


def test_dry_run_types_everything_and_leaves_nothing(capsys, here):
    assert run(["train", "recipe=grpo", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["recipe"]["name"] == "grpo"
    assert left_behind(here) == []


# Slips: one line, exit 2, a suggestion

KEYS = "(cookbook train --cfg job prints every key)"
COMPOSED = [
    (["recipe=grop"], "unknown recipe 'grop'. Did you mean 'grpo'? (choices: distill, dpo, grpo, kto, orpo, sft)"),
    (["recipe=ppo"], "unknown recipe 'ppo'; write recipe=grpo loss=ppo (choices: distill, dpo, grpo, kto, orpo, sft)"),
    (
        ["push_to_hub=true"],
        "unknown key 'push_to_hub'; after the run, `cookbook weights push RUN USER/NAME` uploads its newest checkpoint",
    ),
    (
        ["recipe=dpo", "loss=ipo"],
        "unknown loss 'ipo'; write loss.variant=ipo (choices: cispo, cross_entropy, dapo, dft, dpo, dppo, dr_grpo, dro, grpo, "
        "gspo, importance_sampling, kto, orpo, ppo, sapo, simpo)",
    ),
    (["lr=1e-5"], "unknown key 'lr'; write optim.lr=1e-5"),
    (["recpie=grpo"], f"unknown key 'recpie'. Did you mean 'recipe'? {KEYS}"),
    (["+recpie=grpo"], f"unknown key 'recpie'. Did you mean 'recipe'? {KEYS}"),
    (["++recpie=grpo"], f"unknown key 'recpie'. Did you mean 'recipe'? {KEYS}"),
    (["optim.lrr=1"], f"unknown key 'optim.lrr'. Did you mean 'optim.lr'? {KEYS}"),
    (["optim=adamww"], "unknown optim 'adamww'. Did you mean 'adamw'? (choices: adafactor, adamw)"),
    (["optim="], "optim: no option given (choices: adafactor, adamw)"),
    (
        ["experiment=mine"],
        f"unknown experiment 'mine'. (choices: {', '.join(sorted(file.stem for file in CONF.glob('experiment/*.yaml')))})",
    ),
    (
        ["optim.lr=1e-5,1e-6"],
        "'optim.lr=1e-5,1e-6' is a list of values: add -m to sweep over them, or write 'optim.lr=[1e-5,1e-6]' for one list",
    ),
    (["seed=range(1,3)"], "'seed=range(1,3)' stands for several values: add -m to sweep over them"),
    (["optim=null"], "a group takes an option name, not null: write ~group to drop it"),
    (["optim=3"], "optim: a group takes an option name, not a number or true: write optim=NAME (choices: adafactor, adamw)"),
    (["checkpoint=./x"], "unknown checkpoint './x'. (choices: default)"),
    (["~optm"], "~optm: 'optm' is not in the configuration. Did you mean 'optim'?"),
    (["+optim.lr=3"], "optim.lr is already in the configuration; write optim.lr=... without the +"),
    (["+optim=adamw"], "optim is already in the configuration; write optim=... without the +"),
    (["++optim=adamw"], "optim is already in the configuration; write optim=... without the +"),
    (["optim@other=adamw"], "optim@other is not a chosen group; write +optim@other=... to add it"),
    (
        ["optim.lr"],
        "cannot read 'optim.lr'; write key=value, and quotes around what is not a plain word: key=\"'a = b'\"",
    ),
    (
        ["model.name=a=b"],
        "cannot read 'model.name=a=b'; write key=value, and quotes around what is not a plain word: key=\"'a = b'\"",
    ),
    (["grpo"], "cannot read 'grpo'; write recipe=grpo"),
    (["recipe", "=", "sft"], "cannot read 'recipe'; write recipe=sft, without spaces around the ="),
    (["seed=1", "recipe", "=sft"], "cannot read 'recipe'; write recipe=sft, without spaces around the ="),
    (["optim.lr=", "1e-4", "seed=1"], "cannot read '1e-4'; write optim.lr=1e-4, without spaces around the ="),
    (["hydra.mode=FOO"], "hydra.mode=FOO: Invalid value 'FOO', expected one of [RUN, MULTIRUN]"),
    (["model.name=${nope}", "--resolve"], "model.name: Interpolation key 'nope' not found"),
    (["-cn", "nope"], "--config-name: nope.yaml not found in ./conf, a --config-dir, or the packaged conf"),
    (["-cd", "nope"], "--config-dir: folder not found, got nope"),
    (["-p", "optm"], f"unknown key 'optm'. Did you mean 'optim'? {KEYS}"),
    (["--multrun"], "No such option: --multrun (Possible options: --multirun)"),
]
TYPED = [
    (["optim.lr=fast"], "optim.lr: expected a number, got 'fast'"),
    (["optim.lr=-1"], "optim: lr must be >= 0 and finite, got -1.0"),
    (["loss.normalization=tokens"], "loss.normalization: expected one of num_loss_tokens, num_sequences, got 'tokens'"),
    (["loss._target_=cookbook.losses.GPRO"], "loss._target_: 'cookbook.losses' has no 'GPRO'. Did you mean 'GRPO'?"),
    (
        ["recipe=sft", "loss.normalization=num_sequences"],
        "loss: CrossEntropy already returns a mean; normalization=num_sequences would divide twice. Use normalization=null",
    ),
    (
        ["+optim.betas=1"],
        "unknown key 'optim.betas'. Did you mean 'beta2'? (OptimConfig has lr, beta1, beta2, eps, weight_decay, "
        "grad_clip_norm)",
    ),
    (["~optim"], "optim: no _target_, the class these keys belong to; choose a file of conf/optim/"),
    (["~model"], "model: expected keys and values, got nothing; choose a file of conf/model/"),
    (["resume=true"], "resume: expected auto, never, force or a checkpoint, got true; write resume=auto"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    rest_slow(
        [(["--cfg", "job", *words], message) for words, message in COMPOSED]
        + [(["--dry-run", *words], message) for words, message in TYPED],
        fast=4,
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_costs_one_line(capsys, here, arguments, message):
    assert run(["train", *arguments]) == 2
    got = capsys.readouterr()
    assert got.err == f"error: {message}\n"
    assert got.out == ""
    assert left_behind(here) == []


@pytest.mark.slow
def test_slips_in_the_users_files(capsys):
    write("conf/recipe/no_package.yaml", "recipe:\n  name: sft\ndefaults:\n  - override /optim: adamw\n")
    write("conf/recipe/broken.yaml", "# @package _global_\nrecipe:\n  name: sft\n bad: [1\n")
    write("conf/recipe/twice.yaml", "# @package _global_\nrecipe:\n  name: sft\n  name: grpo\n")
    write("conf/recipe/optmi.yaml", "# @package _global_\ndefaults:\n  - override /optmi: adamw\nrecipe:\n  name: sft\n")
    expected = {
        "no_package": "a file in conf/recipe/ overrides /optim, so it must start with '# @package _global_'",
        "broken": "conf/recipe/broken.yaml:4: not valid YAML: expected <block end>, but found '<block mapping start>'",
        "twice": "conf/recipe/twice.yaml:4: not valid YAML: found duplicate key name",
        "optmi": "conf/recipe/optmi.yaml overrides /optmi, which the configuration does not choose. Did you mean 'optim'?",
    }
    for name, message in expected.items():
        assert run(["train", "--cfg", "job", f"recipe={name}"]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


# Running


def test_a_run_gets_its_configuration_and_leaves_nothing(here):
    seen = []
    run_job(ComposeRequest(["recipe=sft", "optim.lr=1e-5"]), job_that_notes(seen))
    assert seen == [(1e-5, ["recipe=sft", "optim.lr=1e-5"])]
    assert Path.cwd() == here and left_behind(here) == []


@pytest.mark.slow
def test_a_sweep_continues_after_a_failed_run_and_reports_the_failure(capsys, here):
    seen = []
    with pytest.raises(CookbookError) as caught:
        run_job(ComposeRequest(["optim.lr=1e-5,-1,1e-6"], multirun=True), job_that_notes(seen))
    assert str(caught.value) == "1 of 3 runs failed: optim: lr must be >= 0 and finite, got -1.0"
    assert [lr for lr, _ in seen] == [1e-5, 1e-6]
    assert "run 2 failed: optim: lr must be >= 0" in capsys.readouterr().err
    assert left_behind(here) == []


@pytest.mark.slow
def test_a_failed_run_of_a_sweep_is_freed_before_the_next_one():
    class Model:
        pass

    models, alive = [], []

    def job(cfg, overrides):
        gc.collect()
        alive.append(sum(model() is not None for model in models))
        model = Model()
        models.append(weakref.ref(model))
        raise ConfigError("data: wrong")

    with pytest.raises(CookbookError, match="2 of 2 runs failed: data: wrong"):
        run_job(ComposeRequest(["seed=1,2"], multirun=True), job)
    assert alive == [0, 0]


@pytest.mark.slow
def test_a_sweep_over_groups_and_by_hydras_own_key(here):
    names = []
    run_job(ComposeRequest(["recipe=sft,grpo", "hydra.mode=MULTIRUN"]), lambda cfg, overrides: names.append(cfg.recipe.name))
    assert names == ["sft", "grpo"]
    with pytest.raises(ConfigError, match="unknown recipe 'grop'"):
        run_job(ComposeRequest(["recipe=sft,grop"], multirun=True), lambda cfg, overrides: names.append("none must run"))
    with pytest.raises(ConfigError, match="a group takes an option name, not null"):
        run_job(ComposeRequest(["optim=adamw,null"], multirun=True), lambda cfg, overrides: names.append("none must run"))
    assert names == ["sft", "grpo"]
    assert left_behind(here) == []


def test_runs_of_a_sweep_do_not_share_a_folder():
    seen = []
    with pytest.raises(ConfigError, match=r"out: every run would write to x; drop it, or write 'out=x/\$\{seed\}'"):
        run_job(ComposeRequest(["seed=1,2", "out=x"], multirun=True), job_that_notes(seen))
    assert seen == []
    outs = []
    run_job(ComposeRequest(["seed=1,2", "out=x/${seed}"], multirun=True), lambda cfg, overrides: outs.append(cfg.out))
    assert outs == ["x/1", "x/2"]


def fail(error):
    def job(*_):
        raise error

    return job


@pytest.mark.parametrize("multirun", rest_slow([False, True]))
def test_a_bug_keeps_its_type_and_a_stop_stops(multirun):
    request = ComposeRequest(["seed=1,2"] if multirun else ["seed=1"], multirun=multirun)
    with pytest.raises(ZeroDivisionError):
        run_job(request, fail(ZeroDivisionError("a bug")))
    with pytest.raises(ValueError, match="a recipe's own") as caught:
        run_job(request, fail(ValueError("a recipe's own")))
    assert not isinstance(caught.value, CookbookError)
    with pytest.raises(KeyboardInterrupt):
        run_job(request, fail(Interrupted(3)))


def test_exit_codes(monkeypatch, capsys):
    for error, code in ((ConfigError("data: wrong"), 2), (KeyboardInterrupt(), 130), (Interrupted(7), 130)):
        monkeypatch.setattr("cookbook.run.builder.train", fail(error))
        assert run(["train", "recipe=sft"]) == code
        assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setattr("cookbook.run.builder.train", fail(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        run(["train", "recipe=sft"])


def test_a_dropped_group_is_null(here):
    seen = []
    run_job(ComposeRequest(["~reward"]), lambda cfg, overrides: seen.append(cfg.reward))
    assert seen == [None]


# The user's folder wins


def test_the_users_conf_and_recipe_win_and_are_named(capsys):
    write("conf/optim/adamw.yaml", (CONF / "optim/adamw.yaml").read_text().replace("1e-5", "7.0"))
    write("recipes/sft.py", "")
    seen = []
    run_job(ComposeRequest(["loss=cross_entropy"]), job_that_notes(seen))
    err = capsys.readouterr().err
    assert "using ./conf/optim/adamw.yaml instead of the packaged one\n" in err
    assert "recipes" not in err
    run_job(ComposeRequest(["recipe=sft"]), job_that_notes(seen))
    assert "using ./recipes/sft.py instead of the packaged one\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_config_dir_comes_before_conf(tmp_path, capsys):
    for folder, eps in (("conf", "2.0"), ("other", "3.0")):
        write(f"{folder}/optim/mine.yaml", f"eps: {eps}\n")
    for folders, eps in (([], "2.0"), (["-cd", "other"], "3.0")):
        assert run(["train", "--cfg", "job", "-p", "optim.eps", "optim=mine", *folders]) == 0
        assert capsys.readouterr().out == f"{eps}\n"
    assert run(["train", "-i", "searchpath", "-cd", "other"]) == 0
    lines = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if "://" in line]
    assert [provider.strip() for provider, _ in lines] == ["hydra", "command-line", "user", "cookbook", "schema"]


# An earlier run again


@pytest.mark.slow
def test_the_config_of_an_earlier_run(capsys):
    write("old.yaml", show(ComposeRequest(["recipe=grpo", "optim.lr=0.25", "loss.clip_high=0.5"]), "job", resolve=True))
    again = yaml.safe_load(show(ComposeRequest([], config_file=Path("old.yaml")), "job"))
    assert again == yaml.safe_load(Path("old.yaml").read_text())
    changed = yaml.safe_load(show(ComposeRequest(["optim.lr=0.5", "loss=dpo"], config_file=Path("old.yaml")), "job"))
    assert changed["optim"]["lr"] == 0.5
    assert changed["loss"] == yaml.safe_load((CONF / "loss/dpo.yaml").read_text())  # replaced, not merged
    assert {key: value for key, value in changed.items() if key not in ("optim", "loss")} == {
        key: value for key, value in again.items() if key not in ("optim", "loss")
    }
    seen = []
    run_job(ComposeRequest(["seed=1,2", "optim=adamw"], multirun=True, config_file=Path("old.yaml")), job_that_notes(seen))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--config", "nope.yaml"],
            "nope.yaml: not found; write one with: cookbook init sft nope.yaml",
        ),
        (["--config", "list.yaml"], "list.yaml: holds no keys; write keys as on the command line, such as recipe: sft"),
        (["--config", "broken.yaml"], "broken.yaml:3: not valid YAML: could not find expected ':'"),
        (["--config", "old.yaml", "lr=1"], "unknown key 'lr'; write optim.lr=1"),
        (
            ["--config", "old.yaml", "recipe=sft"],
            "recipe: old.yaml has settled the recipe and all that it chooses; drop recipe=sft",
        ),
    ],
)
def test_a_config_that_cannot_be_used(capsys, words, message):
    write("list.yaml", "- 1\n")
    write("broken.yaml", "a: 1\nb\nc: 2\n")
    parts = "".join(f"{group}:\n  _target_: x.Y\n" for group in ("model", "data", "loss"))
    write("old.yaml", f"{parts}optim:\n  lr: 1\nrecipe:\n  name: sft\n")
    assert run(["train", "--cfg", "job", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


# Hydra's own


def test_composes_what_hydra_main_composes(tmp_path):
    overrides = ["recipe=dpo", "optim.lr=1e-5", "model=qwen3_0p6b", "+data.extra={a: [1, 2]}", "~reward", "tracker=wandb"]
    write(
        "main.py",
        "import hydra\n"
        f"@hydra.main(config_path={str(CONF)!r}, config_name='train', version_base='1.3')\n"
        "def main(cfg): pass\n"
        "main()\n",
    )
    command = [sys.executable, "main.py", "--cfg", "job", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == show(ComposeRequest(overrides), "job")
