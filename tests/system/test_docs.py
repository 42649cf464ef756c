"""The documentation site: complete tables, a generated reference without gaps, drawings, and the site, built and searched."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import browser
import pytest
import typer
import yaml
from marks import rotating
from places import ROOT
from runtools import BRIEF, SMALL, here, rows, train  # noqa: F401 - here is a fixture

import cookbook
from cookbook.cli.app import app

# The first words of metrics, and names of another kind that begin with one of them.
GROUPS = "curriculum|data|env|eval|kl|logprobs|loss|optim|refill|reward|rewards|rollout|sync|time|tokens"
OTHER = {"tokens/s"}
# Prefixes of the code, and what the table writes for them.
FAMILIES = {"eval/pass@": "eval/pass@K", "eval/reward/part/": "eval/reward/part/NAME", "reward/part/": "reward/part/NAME"}


def in_table() -> set[str]:
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    return {name for line in text.splitlines() if (name := "".join(re.findall(r"^\| `([^`]+)`", line)))}


def in_code() -> set[str]:
    """Return the metrics that the package names, those with a placeholder left out."""
    paths = [*(ROOT / "cookbook").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    names = set(re.findall(rf"[\"'`]((?:{GROUPS})/[\w@/]*\w@?/?)[\"'`]", text)) - OTHER
    # Of one evaluation, every metric of the loss: eval/NAME.
    return {FAMILIES.get(name, name) for name in names if not name.startswith(("eval/rewards/",))}


def known(name: str, table: set[str]) -> bool:
    """Whether the table has the name of a run's metric."""
    part, _, rest = name.partition("eval/")
    return (
        name in table
        or re.sub(r"(part/).*", r"\1NAME", name) in table
        or re.sub(r"@\d+$", "@K", name) in table
        or (not part and (rest in table or rest == "loss"))
    )


def test_the_table_of_metrics_is_complete() -> None:
    code = in_code()
    assert len(code) > 50
    assert code - in_table() == set()
    # The other way round: nothing in the table that the code does not name.
    written = in_table() - {"step", "loss", "eval/NAME"} - {name for name in in_table() if name.startswith("curriculum/")}
    assert written - code == set()


# Runs that log most of the metrics between them: recipes, losses with metrics of their own, environments, tools of GRPO.
LOGGING = {
    "sft": [],
    "dpo": [],
    "orpo": [],
    "grpo": [
        "reward=[number,format]", "rollout.refill=2", "data.curriculum={}", "eval.pass_at=[1,2]", "loss.kl_beta=0.01",
        "weight_sync.every=2", "loss.anchor=trainer", "loss.icepop_threshold=2.0",
    ],
    "grpo env=arithmetic": ["rollout.ahead=1"],
    "grpo loss=dro": [],
    "grpo loss=sapo": [],
    "grpo loss=dppo": [],
    "grpo loss=cispo": [],
}  # fmt: skip


@pytest.mark.parametrize("recipe", rotating(LOGGING, 3))
def test_the_table_has_every_metric_that_a_run_logs(recipe: str, here: Path) -> None:  # noqa: F811
    name, *chosen = recipe.split()
    small = [word for word in SMALL[name] if not (chosen == ["env=arithmetic"] and word.startswith("data.limit"))]
    assert train(*small, *BRIEF, *chosen, *LOGGING[recipe], "out=run") == 0
    names = {name for row in rows("run") for name in row}
    assert len(names) > 15
    assert {name for name in names if not known(name, in_table())} == set()


@cache
def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_names_pages_and_the_drawings_are_those_of_the_script() -> None:
    text = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(
        re.findall(
            r": ((?:guide|operate|evidence)/[\w-]+\.md|reference/(?:support|metrics|tinker-[\w-]+)\.md)$", text, re.MULTILINE
        )
    )
    assert named == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    for name, drawing in make_docs().drawings().items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == drawing, "run scripts/make_docs.py --drawings"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, str(ROOT / "scripts" / "make_docs.py"), str(tmp_path / "file" / "docs")]
    done = subprocess.run(words, capture_output=True, text=True)
    line = f"make_docs: cannot write {tmp_path}/file/docs: Not a directory; make the folder writable\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """The signal arrives when the program creates its folder: during an import, an extension may print a line of its own."""
    lines = "import os, pathlib, signal\npathlib.Path.mkdir = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "sitecustomize.py").write_text(lines)
    words = [sys.executable, str(ROOT / "scripts" / "make_docs.py"), str(tmp_path / "docs")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "make_docs: interrupted\n", 130)


@pytest.mark.slow
def test_the_reference_has_every_command_key_and_name() -> None:
    commands = make_docs().cli_page()
    for name, command in make_docs().commands(typer.main.get_command(app), "cookbook"):
        assert f"## {name}\n" in commands
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        assert all(option in commands for parameter in shown for option in parameter.opts if option.startswith("--"))
    configuration = make_docs().configuration_page()
    for path in (ROOT / "conf").glob("*/*.yaml"):
        if path.stem.startswith("_"):
            continue
        part = configuration.partition(f"### {path.parent.name}={path.stem}\n")[2].partition("\n##")[0]
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        plain = [key for key, value in values.items() if key not in ("_target_", "defaults") and not isinstance(value, dict)]
        assert all(f"`{path.parent.name}.{key}`" in part or f"| `{key}`" in part for key in plain), path
    python = make_docs().python_page()
    assert all(f"::: {home}.{name}\n" in python for name, home in cookbook._HOMES.items())
    names = make_docs().names_table()
    entries = yaml.safe_load((ROOT / "cookbook" / "cli" / "hydra" / "foreign_names.yaml").read_text(encoding="utf-8"))
    assert all(f"| `{name}` |" in names for name in entries)


def mkdocs() -> Path:
    """Return the program of ``make docs``; skip without it."""
    path = Path(os.environ.get("COOKBOOK_DOCS", ROOT / ".venv-docs")) / "bin" / "mkdocs"
    if not path.is_file():
        pytest.skip(f"{path} does not exist; `make docs` installs it")
    return path


# `make docs` builds it in CI, where a warning is an error.
@pytest.mark.nightly
def test_the_site_builds_without_a_warning_or_the_network_and_can_be_searched() -> None:
    program = mkdocs()
    made = make_docs()
    pages = made.pages(None)
    out = ROOT / "build"
    made.write(pages, out / "docs")
    words = [str(program), "build", "--quiet", "--strict", "--config-file", str(ROOT / "docs" / "site" / "mkdocs.yml")]
    done = subprocess.run(words, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    site = out / "site"
    assert {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")} - {"404.md"} == set(pages)
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link rel="stylesheet"|img)[^>]* (?:src|href)="([^"]+)"', path.read_text(encoding="utf-8")
        )
        assert not [address for address in loaded if address.startswith(("http", "//"))], path
    if browser.program() is not None:
        search(site / "index.html")


def search(page: Path) -> None:
    """Search from file://, as a reader does."""
    with browser.page() as tab:
        tab.call("Page.navigate", url=page.as_uri())
        tab.wait("document.readyState === 'complete'")
        field = "document.querySelector('[data-md-component=search-query]')"
        events = "['focus', 'keyup', 'input'].forEach(name => field.dispatchEvent(new Event(name, {bubbles: true})))"
        typed = f"(() => {{ const field = {field}; field.focus(); field.value = 'curriculum'; {events}; }})()"
        # A word that is typed before the page's script listens is lost, so it is typed until a result appears.
        tab.wait(f"{typed} || document.querySelector('.md-search-result__item') !== null")
        assert tab.errors == [] and not [one for one in tab.requests if one.startswith("http")]
