"""``cookbook compare --html``: two runs side by side on one page."""

import json
from pathlib import Path

import pytest
from runtools import here  # noqa: F401 - a fixture

from cookbook.cli.app import run

pytestmark = pytest.mark.usefixtures("here")


def recorded(name, lr, accuracy):
    folder = Path(name)
    folder.mkdir()
    (folder / "config.yaml").write_text(f"recipe: {{name: grpo}}\noptim: {{lr: {lr}}}\n")
    metrics = [{"step": step, "eval/accuracy": accuracy * step, "loss": 1.0 / (step + 1)} for step in (0, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    texts = [f"{name} at {step} <b>" for step in (0, 1)]
    samples = [{"step": step, "split": "eval", "prompt": "1+1=", "completion": texts[step], "reward": step} for step in (0, 1)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))


def test_two_runs_share_a_page(capsys):
    recorded("a", 0.1, 0.5)
    recorded("b", 0.2, 0.75)
    assert run(["compare", "a", "b", "--html", "both.html"]) == 0
    assert capsys.readouterr().out == "wrote both.html\n"
    page = Path("both.html").read_text()
    assert "<tr><td>optim.lr</td><td>0.1</td><td>0.2</td></tr>" in page
    assert "held-out accuracy (share of prompts)" in page and "optimizer steps" in page
    # Two panels with a line for each run; completions of the last evaluation, as text.
    assert page.count("<polyline") == 4
    assert "a at 1 &lt;b&gt;" in page and "b at 1 &lt;b&gt;" in page and "at 0" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert run(["compare", "a", "b", "--html", "missing/both.html"]) == 2
    assert "give a file, for example --html compare.html" in capsys.readouterr().err
