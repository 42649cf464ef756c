"""Write the pages of the documentation site to build/docs: the pages of docs/, and the generated reference.

``make docs`` calls it, then MkDocs. The reference is read from the code itself: the command line from typer, the configuration
from ``conf/`` and the dataclasses that it names, the HTTP API from the server's OpenAPI description, the files from a real run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# What `make docs` writes: the pages, and MkDocs' site.
BUILD = ROOT / "build"
LINK = re.compile(r"(\]\()(?!https?:|#)([\w./-]+)((?:#[\w-]+)?\))")
# Pages in the root of the checkout, and their places on the site.
OF_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "AGENTS.md": "agents-guide.md"}
# Place in docs/guide/coming-from.md for the table of all names.
NAMES_MARK = "<!-- names -->"
# Sections of the page of the Python API, and the modules that it documents there.
PYTHON = {
    "Run a recipe": "cookbook.cli.hydra.python_api cookbook.run.result",
    "Training and sampling": "cookbook.service cookbook.futures",
    "Data and parameters": "cookbook.types",
    "Hooks": "cookbook.run.hooks cookbook.protocols",
    "Errors": "cookbook.errors",
    "Trainer jobs": "cookbook.jobs.",
    "vLLM servers": "cookbook.deployments.",
    "Losses": "cookbook.losses",
    "Output head": "cookbook.engine.",
}
# Files of a run folder. The build fails if a run writes another one.
FILES = {
    "config.yaml": "resolved configuration; `cookbook train --config RUN/config.yaml` repeats the run",
    "metrics.jsonl": "one line per step with every [metric](metrics.md)",
    "samples.jsonl": "a few rollouts of every step, and completions of evaluations",
    "bad_rows.jsonl": "rows that were left out, with the reason",
    "rollouts.jsonl.gz": "all rollouts or rows with their tokens, for `cookbook view`",
    "curves.svg": "curves of the metrics",
    "log.txt": "messages with their time; tracebacks",
    "status.json": "state, step, error, and the command to resume",
    "environment.json": "versions of packages, git state, machine",
    ".lock": "held by the process that trains",
    "checkpoints/": "one Hugging Face folder per checkpoint",
    "checkpoints/config.json": "architecture, as transformers writes it",
    "checkpoints/generation_config.json": "defaults of generation, as transformers writes them",
    "checkpoints/model.safetensors": "weights; an adapter has adapter_model.safetensors",
    "checkpoints/tokenizer.json": "tokenizer",
    "checkpoints/tokenizer_config.json": "tokenizer's options",
    "checkpoints/chat_template.jinja": "chat template",
    "checkpoints/README.md": "model card",
    "checkpoints/checkpoint.json": "step, what identifies the run, state of its data, and digests of the files",
    "checkpoints/sampler/": "weights that the run samples from, if a step without a weight sync has passed",
    "checkpoints/trainer/": "optimizer state in safetensors, as torch.distributed.checkpoint writes it",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=BUILD / "docs")
    parser.add_argument("--drawings", action="store_true", help="write the drawings of docs/images and stop")
    parser.add_argument("--run", type=Path, help="describe the files of this run; by default a short run is trained")
    arguments = parser.parse_args()
    if arguments.drawings:
        for name, text in drawings().items():
            (DOCS / "images" / name).write_text(text, encoding="utf-8")
        return
    # Before the run for the page of files, which takes half a minute.
    with written(arguments.out):
        empty(arguments.out)
    if arguments.out == BUILD / "docs":
        # MkDocs prints a trace if it cannot write there.
        with written(BUILD / "site"):
            empty(BUILD / "site")
    texts = pages(arguments.run)
    with written(arguments.out):
        write(texts, arguments.out)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Context that writes into the folder; an error of the disk is one line."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"make_docs: cannot write {folder}: {error.strerror}; make the folder writable") from None


def empty(folder: Path) -> None:
    """Create the folder, or remove what it holds."""
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def write(texts: Mapping[str, str], out: Path) -> None:
    """Write the pages, images and assets; what was in the folder is removed."""
    empty(out)
    for name, text in texts.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copytree(DOCS / "images", out / "images")
    (out / "assets").mkdir()
    for name in ("iframe-worker.js", "site.css"):
        shutil.copy(DOCS / "site" / name, out / "assets" / name)


def pages(run: Path | None) -> dict[str, str]:
    """Return the Markdown of every page by its path on the site. ``run`` is described on the page of files."""
    written = {place: ROOT / name for name, place in OF_ROOT.items()}
    written |= {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    texts = {place: on_site(path, place) for place, path in written.items()}
    texts["guide/coming-from.md"] = texts["guide/coming-from.md"].replace(NAMES_MARK, names_table())
    return texts | {
        "reference/cli.md": cli_page(),
        "reference/configuration.md": configuration_page(),
        "reference/python.md": python_page(),
        "reference/http.md": http_page(),
        "reference/files.md": files_page(run) if run else _files_of_a_new_run(),
    }


def on_site(page: Path, place: str) -> str:
    """Return a page with the links of the site, whose root holds the pages of the checkout's root and the folders of docs/."""

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve().relative_to(ROOT)
        if target.parts[0] != "docs" and str(target) not in OF_ROOT:
            raise SystemExit(f"{page.relative_to(ROOT)}: {match[2]} is not a page of the site; name it as code, without a link")
        on_site = OF_ROOT.get(str(target)) or target.relative_to("docs").as_posix()
        return match[1] + os.path.relpath(on_site, Path(place).parent) + match[3]

    return LINK.sub(link, page.read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(escaped(cell, 'table') for cell in line)} |\n" for line in lines) + "\n"


def escaped(text: str, place: str = "") -> str:
    """Return Markdown in which ``<word>`` outside of code is text, not a tag; and in a table ``|``, not the end of a cell."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = [part if part.startswith("`") else part.replace("<", "&lt;") for part in parts]
    return "".join(part.replace("|", "&#124;") if place and not part.startswith("`") else part for part in plain)


def code(value: object) -> str:
    return f"`{value}`" if str(value) else ""


# Command line


def cli_page() -> str:
    from cookbook.cli.app import app

    text = "# Command line\n\nGenerated from `cookbook --help` and its subcommands.\n\n"
    return text + "".join(_command(name, command) for name, command in commands(typer.main.get_command(app), "cookbook"))


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name."""
    if not hasattr(command, "commands"):
        yield name, command
    for word, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield from commands(child, f"{name} {word}")


def _command(name: str, command: Any) -> str:
    context = command.make_context(name.rpartition(" ")[2], [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and record[0] != "--help":
            rows.append([code(record[0]), record[1]])
    text = f"## {name}\n\n```text\n{usage}\n```\n\n{_help(command.help or '')}\n\n"
    return text + (table(["option", "meaning"], rows) if rows else "")


def _help(text: str) -> str:
    """Return a help text; paragraphs that typer prints as they are written become code."""
    parts = []
    for part in text.split("\n\n"):
        fixed = part.lstrip().startswith("\b")
        parts.append(f"```text\n{part.partition(chr(8))[2].strip(chr(10))}\n```" if fixed else escaped(part.strip()))
    return "\n\n".join(parts)


# Configuration


def configuration_page() -> str:
    groups = sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir())
    text = (
        "# Configuration\n\nGenerated from `conf/`. `cookbook train recipe=NAME --cfg job` prints the values of a run. "
        "A group is chosen by `group=file`, a key is set by `group.key=value`.\n\n"
    )
    text += _conf_file(ROOT / "conf" / "train.yaml", "") + _conf_file(ROOT / "conf" / "serve.yaml", "")
    for group in groups:
        text += f"## {group}\n\n"
        for path in sorted((ROOT / "conf" / group).rglob("*.yaml")):
            if not path.stem.startswith("_"):
                text += _conf_file(path, group)
    return text


def _conf_file(path: Path, group: str) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    name = path.relative_to(ROOT / "conf" / group).with_suffix("")
    about = " ".join(
        line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line and "???" not in line
    )
    about = re.sub(r"\bcookbook (?:train|eval) \w+=.*$", r"`\g<0>`", about)
    header = f"### {group}={name}\n\n" if group else f"## conf/{path.name}\n\n"
    if group == "demo":
        header = f"### demo/{name}\n\n"
    target = next((line.split()[1] for line in lines if line.startswith("_target_:")), None)
    is_global = any("@package _global_" in line for line in lines)
    rows = [
        [code(key if is_global or not group else f"{group}.{key}"), code(_type(target, key)), code(value), comment]
        for key, value, comment in conf_keys(lines)
    ]
    chosen = [
        re.sub(r"override |/(?=\w+:)", "", line.strip("- \t")) for line in lines if re.match(r"\s+- (override )?/?\w+: ", line)
    ]
    text = header + (escaped(about) + "\n\n" if group else "")
    if target:
        text += f"Class: `{target}`\n\n"
    if chosen:
        text += "Chooses: " + ", ".join(code(line.partition("#")[0].strip()) for line in chosen) + "\n\n"
    typed = any(row[1] for row in rows)
    shown = rows if typed else [[row[0], *row[2:]] for row in rows]
    return text + (table(["key", *(["type"] if typed else []), "value", "meaning"], shown) if rows else "")


def conf_keys(lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield path, value and comment of every key. A comment above a key belongs to it, except at the file's start."""
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    in_header, in_defaults = True, False
    for line in lines:
        if line.lstrip().startswith("#"):
            above += [] if in_header else [line.strip("# \t")]
            continue
        in_header = False
        found = re.match(r"( *)([\w-]+):(?: (.*?))?(?:\s+#\s*(.*))?$", line)
        in_defaults = (in_defaults and line.startswith(" ")) or line.startswith("defaults:")
        if found is not None and not in_defaults and found[2] != "_target_":
            parents = [(indent, key) for indent, key in parents if indent < len(found[1])]
            if found[3]:
                path = ".".join([*(key for _, key in parents), found[2]])
                yield path, found[3].strip(), found[4] or " ".join(above)
            else:
                parents.append((len(found[1]), found[2]))
        above = []


def _type(target: str | None, key: str) -> str:
    """Return the annotation of a field; empty if the target is a function or the key is a field of a field."""
    if target is None or "." in key:
        return ""
    from cookbook.config.typed import resolve_target

    cls = resolve_target(target, "make_docs")
    fields = {one.name: one.type for one in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    kind = fields.get(key, "")
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


# Python API


def python_page() -> str:
    import cookbook

    text = (
        "# Python API\n\nThe public names of `import cookbook`, generated from their docstrings. "
        "[Your own loop](../guide/python-api.md) explains how they work together.\n\n"
    )
    for title, modules in PYTHON.items():
        names = [
            f"{module}.{name}"
            for name, module in cookbook._HOMES.items()
            if any(module == one or (one.endswith(".") and module.startswith(one)) for one in modules.split())
        ]
        text += f"## {title}\n\n" + "".join(f"::: {name}\n    options:\n      heading_level: 3\n\n" for name in names)
    return text


# HTTP API


def http_page() -> str:
    from fastapi import FastAPI

    from cookbook.server.app import add_routes

    paths: Mapping[str, Any] = add_routes(FastAPI()).openapi()["paths"]
    rows = []
    for path, methods in paths.items():
        for method, operation in methods.items():
            named = [f"`{one['name']}`" for one in operation.get("parameters", []) if one["in"] != "header"]
            bodies = operation.get("requestBody", {}).get("content", {}).values()
            named += [f"`{name}`" for body in bodies for name in body.get("schema", {}).get("properties", {})]
            about = operation.get("description") or f"{operation['summary']}."
            rows.append([code(f"{method.upper()} {path}"), about.partition("\n\n")[0].replace("\n", " "), ", ".join(named)])
    return (
        "# HTTP API\n\nThe routes of `cookbook serve`, generated from its OpenAPI description, which a server has at "
        "`/api/v1/openapi.json` and shows at `/api/v1/docs`. Bodies are those of Tinker's client "
        "([compatibility](tinker-compatibility.md)) and of OpenAI's API ([endpoint](../operate/endpoint.md)); "
        "a key is sent as `X-API-Key` or as a bearer token.\n\n"
        + table(["route", "what", "parameters and fields of the body"], rows)
    )


# Files


def _files_of_a_new_run() -> str:
    """Train three steps, and describe the files."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["recipe=grpo", "debug=fast", "recipe.prompts_per_step=4", f"out={run}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "cookbook", "train", *words], cwd=folder, env=environment, text=True, capture_output=True
        )
        if done.returncode:
            raise SystemExit(f"make_docs: the run for the page of files failed:\n{done.stdout}{done.stderr}")
        return files_page(run)


def files_page(run: Path) -> str:
    rows: dict[str, list[str]] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = re.sub(r"^checkpoints/[\w.-]+/", "checkpoints/", path.relative_to(run).as_posix())
        name = re.sub(r"^(checkpoints/(?:trainer|sampler)/).*", r"\1", name)
        if name not in FILES:
            raise SystemExit(f"make_docs: a run writes {name}; add what it is to FILES in scripts/make_docs.py")
        shown = name.replace("checkpoints/", "checkpoints/step-N/")
        rows[name] = [code(shown), FILES[name], f"{path.stat().st_size:,}"]
    text = (
        "# Files of a run\n\nGenerated from a run of `recipe=grpo` with the shipped model. Sizes are in bytes. "
        "[Runs](../operate/runs.md) explains how the files are used.\n\n"
    )
    text += table(["file", "what", "size"], [rows[name] for name in FILES if name in rows])
    for name in ("metrics.jsonl", "samples.jsonl", "status.json", "environment.json"):
        if not (run / name).is_file():
            # Runs of earlier versions have fewer files.
            continue
        whole = (run / name).read_text(encoding="utf-8")
        value = json.loads(whole.splitlines()[-1] if name.endswith("l") else whole)
        shown = json.dumps(_short(value), indent=2, ensure_ascii=False).replace(str(run.parent), "/work")
        text += f"## {name}\n\n" + ("The last line:\n\n" if name.endswith("l") else "") + f"```json\n{shown}\n```\n\n"
    return text


def _short(value: Any) -> Any:
    """Return a JSON value with long texts and lists cut, and without what differs between machines."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value[:4]] + (["..."] if len(value) > 4 else [])
    return value[:80] + " ..." if isinstance(value, str) and len(value) > 80 else value


# Names of other tools


def names_table() -> str:
    """Return the table of all names of other tools, by the sections of ``foreign_names.yaml``."""
    path = ROOT / "cookbook" / "cli" / "hydra" / "foreign_names.yaml"
    entries = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    sections: dict[str, list[list[str]]] = {}
    section, before = "", "-"
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not before:
            section = line.lstrip("# ")
        elif (found := re.match(r"(\w+):", line)) and found[1] in entries:
            sections.setdefault(section, []).append([code(found[1]), _counterpart(entries[found[1]])])
        before = line
    return "".join(f"### {title}\n\n" + table(["their name", "here"], rows) for title, rows in sections.items())


def _counterpart(entry: Any) -> str:
    if isinstance(entry, list):
        return "; or ".join(_counterpart(one) for one in entry)
    if isinstance(entry, str):
        return code(entry)
    words = [code(entry["form"].replace("{}", "VALUE")) if entry.get("form") else code(entry.get("to", ""))]
    if isinstance(entry.get("values"), Mapping) and entry["values"]:
        words.append("(" + ", ".join(f"{typed}: `{value}`" for typed, value in entry["values"].items()) + ")")
    if entry.get("adds"):
        words.append(f"with `{entry['adds']}`")
    text = " ".join(word for word in words if word)
    note = " ".join(str(entry.get("note", "")).split())
    return "; ".join(part for part in (text, note) if part)


# Drawings


def drawings() -> dict[str, str]:
    """Return the drawings of docs/guide/concepts.md by file name."""
    step = [
        ("prompts", "data", 0), ("rollouts", "deployment", 1), ("rewards", "reward or environment", 2),
        ("advantages", "recipe", 3), ("datums", "tokens, weights, ...", 4), ("log-probabilities", "backend", 5),
        ("loss", "loss(data, logprobs)", 6), ("gradient / divisor", "loss.normalization", 7), ("new weights", "optim", 8),
    ]  # fmt: skip
    return {"concepts-step.svg": _step(step), "concepts-processes.svg": _processes()}


def _svg(width: int, height: int, body: str) -> str:
    style = "text{font-family:sans-serif;font-size:14px;fill:#223}.s{font-size:12px;fill:#556}.b{fill:#eef1fb;stroke:#5a6bb5}"
    style += ".l{stroke:#5a6bb5;fill:none;stroke-width:1.5}.g{fill:#fff;stroke:#99a;stroke-dasharray:4 3}"
    head = '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{style}</style><defs>{head}<path d="M0 0L8 4L0 8z" fill="#5a6bb5"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{body}</svg>\n'
    )


def _box(x: int, y: int, width: int, title: str, about: str, height: int = 52) -> str:
    middle = x + width // 2
    return (
        f'<rect class="b" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        f'<text x="{middle}" y="{y + 22}" text-anchor="middle">{title}</text>'
        f'<text class="s" x="{middle}" y="{y + 40}" text-anchor="middle">{about}</text>'
    )


def _arrow(*points: tuple[int, int]) -> str:
    path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(points))
    return f'<path class="l" d="{path}" marker-end="url(#a)"/>'


def _step(boxes: Sequence[tuple[str, str, int]]) -> str:
    """Draw one step as three rows of three boxes."""
    width, gap, high = 180, 46, 86
    body = ""
    for title, about, number in boxes:
        row, column = divmod(number, 3)
        x, y = 20 + column * (width + gap), 20 + row * high
        body += _box(x, y, width, title, about)
        if column < 2:
            body += _arrow((x + width, y + 26), (x + width + gap, y + 26))
        elif row < 2:
            middle = y + 52 + (high - 52) // 2
            body += _arrow(
                (x + width // 2, y + 52), (x + width // 2, middle), (20 + width // 2, middle), (20 + width // 2, y + high)
            )
    end = 20 + 2 * high + 52
    right, left = 20 + 2 * (width + gap) + width // 2, 8
    body += _arrow((right, end), (right, end + 18), (left, end + 18), (left, 46), (20, 46))
    body += f'<text class="s" x="{left + 20}" y="{end + 34}">next step</text>'
    return _svg(20 + 3 * width + 2 * gap + 20, end + 44, body)


def _processes() -> str:
    """Draw what runs where."""
    body = '<rect class="g" x="10" y="10" width="250" height="236" rx="8"/><text class="s" x="22" y="30">your process</text>'
    body += _box(30, 44, 210, "recipe", "the loop, data, rewards, losses")
    body += _box(30, 112, 210, "run folder", "metrics, samples, checkpoints")
    body += _box(30, 180, 210, "trackers and hooks", "called after every step")
    body += _arrow((135, 96), (135, 112)) + _arrow((135, 164), (135, 180))
    body += '<rect class="g" x="340" y="10" width="330" height="236" rx="8"/>'
    body += '<text class="s" x="352" y="30">the same process, or others</text>'
    body += _box(360, 44, 290, "backend=local", "a thread of your process, or ranks")
    body += _box(360, 112, 290, "backend=remote, or job=slurm", "cookbook serve, over HTTP")
    body += _box(360, 180, 290, "deployment=embedded, or vllm", "samples with the newest weights")
    body += _arrow((240, 70), (300, 70), (360, 70)) + _arrow((300, 70), (300, 138), (360, 138))
    body += _arrow((300, 138), (300, 206), (360, 206))
    return _svg(690, 258, body)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("make_docs: interrupted", file=sys.stderr)
        sys.exit(130)
