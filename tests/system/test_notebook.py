"""Runs from Python: ``cookbook.train``, its result, and the example notebook, executed in a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT
from runtools import SMALL, here, rows  # noqa: F401 - here is a fixture

import cookbook
from cookbook.errors import ConfigError, CookbookError

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.mark.slow
def test_a_recipe_runs_from_python(here, capsys):  # noqa: F811
    (here / "my_loss_module.py").write_text("from cookbook.losses import CrossEntropy\nclass Mine(CrossEntropy):\n    pass\n")
    words = [word for word in SMALL["sft"] if not word.startswith("recipe=")]
    result = cookbook.train(recipe="sft", overrides=[*words, "out=mine", "loss._target_=my_loss_module.Mine"])
    assert result.folder == Path("mine") and "\x1b" not in "".join(capsys.readouterr())
    assert result.metrics["loss"].dropna().tolist() == [row["loss"] for row in rows("mine") if "loss" in row]
    assert list(result.metrics.index) == [0, 1, 2, 3]
    assert [path.name for path in result.checkpoints] == ["step-000003"]
    assert result.config["loss"]["_target_"] == "my_loss_module.Mine"
    assert result.objective == rows("mine")[-1]["eval/accuracy"]
    assert repr(result).startswith("<RunResult mine: finished, 3 steps, eval/accuracy ")
    assert "<svg" in result._repr_html_()
    second = cookbook.train(config="mine/config.yaml", overrides=["out=again", "seed=1"])
    assert cookbook.RunResult("again") == second and second.config["seed"] == 1
    assert list(second.metrics["loss"].dropna()) != list(result.metrics["loss"].dropna())


def test_what_train_refuses(here):  # noqa: F811
    with pytest.raises(ConfigError, match=r"overrides is a list of texts, got 'seed=1'; pass \['seed=1'\]"):
        cookbook.train("sft", "seed=1")
    with pytest.raises(ConfigError, match="starts a sweep"):
        cookbook.train("sft", ["hydra.mode=MULTIRUN"])
    with pytest.raises(CookbookError, match="unknown recipe 'stf'"):
        cookbook.train("stf")
    with pytest.raises(ConfigError, match="RunResult: nowhere is not a run"):
        cookbook.RunResult("nowhere")


@pytest.mark.nightly
def test_the_example_notebook(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    book = nbformat.read(NOTEBOOK, as_version=4)
    # A cell that raises makes this call raise.
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "\\u001b" not in nbformat.writes(book) and "\\r" not in nbformat.writes(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = [one.data["text/plain"] for one in cells[0].outputs if one.output_type == "display_data"]
    # The progress is one output that changes in place.
    assert len(shown) == 1 and shown[0].startswith("step 4/4  loss ")
    assert any("<svg" in one.data.get("text/html", "") for one in cells[1].outputs)
    assert "reward/mean" in cells[2].outputs[0].data["text/html"]
    # The stored notebook shows the same kinds of outputs.
    for one, before in zip(cells, (cell for cell in stored.cells if cell.cell_type == "code"), strict=True):
        assert {o.output_type for o in before.outputs} - {"stream"} == {o.output_type for o in one.outputs} - {"stream"}
