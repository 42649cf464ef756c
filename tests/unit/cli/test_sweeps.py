"""Sweeps: what a launcher and a sweeper of Hydra get from a run, with the plugins that users install."""

import importlib
import math
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from runtools import SMALL, here, rows  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.cli.hydra.bridge import ComposeRequest
from cookbook.cli.hydra.bridge import run as run_job
from cookbook.errors import ConfigError, CookbookError
from cookbook.run.report import objective

pytestmark = pytest.mark.usefixtures("here")


def optuna(*words: str) -> ComposeRequest:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed")
    return ComposeRequest(["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", *words], multirun=True)


def fail(cfg, overrides):
    raise ConfigError("data: wrong")


def results() -> dict:
    (file,) = Path("runs").glob("sweep-*/optimization_results.yaml")
    return yaml.safe_load(file.read_text())


def test_the_objective_is_the_last_value_of_the_metric():
    log = [{"step": 0, "eval/loss": 3.0, "eval/reward": 0.1}, {"step": 1}, {"step": 2, "eval/loss": 2.0, "eval/reward": 0.2}]
    assert objective(log, None) == 0.2  # the first that grows with quality
    assert objective(log, "eval/loss") == 2.0
    assert objective([*log, {"step": 3, "eval/accuracy": 0.5}], None) == 0.5
    assert math.isnan(objective([*log, {"step": 3, "eval/loss": None}], "eval/loss"))  # a run that diverged
    assert objective(log, "eval/accuracy") is None and objective([{"step": 0, "eval/loss": 3.0}], None) is None


@pytest.mark.nightly
def test_optuna_optimizes_real_runs(capsys):
    """Both directions: the best of the trials is found by the metric that the runs report."""
    words = [*SMALL["sft"], "recipe.steps=2", "checkpoint.final=false", "checkpoint.every=null"]
    request = optuna(
        *words,
        "hydra/sweeper/sampler=grid",
        "optim.lr=choice(1e-6,3e-2)",
        "hydra.sweeper.direction=minimize",
        "eval.objective=eval/loss",
    )
    from cookbook.cli.app import _train

    run_job(request, _train)
    losses = [rows(folder)[-1]["eval/loss"] for folder in Path("runs").glob("sft-*")]
    assert len(losses) == 2
    assert results()["best_value"] == min(losses) and float(results()["best_params"]["optim.lr"]) == 0.03
    assert "optimization_results.yaml" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_failed_run_fails_its_trial_alone(capsys):
    def job(cfg, overrides):
        if cfg.seed == 1:
            raise ConfigError("data: wrong")
        return math.nan if cfg.seed == 2 else float(cfg.seed)

    sampler = ["hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=0", "hydra.sweeper.n_trials=8"]
    words = ["seed=choice(1,2,3)", "hydra.sweeper.direction=maximize", *sampler]
    with pytest.raises(CookbookError, match=r"^(data: wrong$|eval\.objective: )"):  # whichever the sampler draws first
        run_job(optuna(*words, "hydra.sweeper.max_failure_rate=0.1"), job)
    run_job(optuna(*words), job)
    assert results()["best_value"] == 3.0
    failures = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines() if " failed: " in line]
    not_finite = "eval.objective: the last value of an accuracy, a reward or a margin of held-out rows is nan, "
    assert {"data: wrong", not_finite + "so the sweeper cannot use the run"} == set(failures)


@pytest.mark.slow
def test_an_objective_that_no_run_reports_is_named(capsys):
    with pytest.raises(CookbookError, match="all 3 trials failed; see the error of each above"):
        run_job(optuna("seed=choice(1,2)", "hydra.sweeper.direction=maximize", "eval.objective=eval/typo"), lambda *_: None)
    assert "eval.objective: the run has not reported eval/typo; choose another metric" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"hydra\.sweeper\.direction: minimize would look for the lowest accuracy; set hydra\.sweeper\.direction=maximize"),
        (["eval.objective=eval/reward"], "minimize would look for the lowest eval/reward"),
        (["eval.objective=eval/loss", "hydra.sweeper.direction=maximize"], "maximize would look for the highest eval/loss"),
    ],
)
def test_the_wrong_direction_is_refused_before_a_run(words, message):
    with pytest.raises(ConfigError, match=message):
        run_job(optuna("seed=choice(1,2)", *words), lambda *_: pytest.fail("no run must start"))


SWEEPER = """
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Halving(Sweeper):
    read = []

    def setup(self, **parts):
        self.launcher = Plugins.instance().instantiate_launcher(**parts)

    def sweep(self, arguments):
        for number, seed in enumerate((4, 2, 1)):
            (result,) = self.launcher.launch([[*arguments, f"seed={seed}"]], initial_job_idx=number)
            self.read.append(result.return_value)
"""


@pytest.mark.slow
def test_a_sweeper_of_the_user_that_returns_nothing(monkeypatch):
    """Hydra's interface of plugins: a sweeper reads the jobs' numbers itself, and need not return them."""
    Path("hydra_plugins").mkdir()
    Path("hydra_plugins/halving.py").write_text(SWEEPER)
    monkeypatch.syspath_prepend(Path.cwd())
    halving = importlib.import_module("hydra_plugins.halving").Halving
    Plugins.instance().register(halving)
    ConfigStore.instance().store(group="hydra/sweeper", name="halving", node={"_target_": "hydra_plugins.halving.Halving"})
    request = ComposeRequest(["hydra/sweeper=halving"], multirun=True)
    run_job(request, lambda cfg, overrides: cfg.seed / 2)
    assert halving.read == [2.0, 1.0, 0.5]
    with pytest.raises(CookbookError, match=r"^data: wrong$"):
        run_job(request, fail)
    assert halving.read == [2.0, 1.0, 0.5]


@pytest.mark.nightly
def test_joblib_runs_a_sweep_in_processes():
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = [*SMALL["sft"], "recipe.steps=1", "checkpoint.final=false", "checkpoint.every=null", "hydra/launcher=joblib"]
    assert run(["train", *words, "hydra.launcher.n_jobs=2", "seed=1,2", "out=both/${seed}", "-m"]) == 0
    assert [rows(f"both/{seed}")[-1]["step"] for seed in (1, 2)] == [1, 1]


@pytest.mark.nightly
def test_joblib_reports_the_run_that_failed(capsys):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = [*SMALL["sft"], "recipe.steps=1", "hydra/launcher=joblib", "optim.lr=-1,-2", "-m"]
    assert run(["train", *words]) == 2
    assert "error: 2 of 2 runs failed: optim: lr must be >= 0 and finite, got -1.0" in capsys.readouterr().err
