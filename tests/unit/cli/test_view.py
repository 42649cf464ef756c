"""``cookbook view``: the stored rollouts of a run, the page, and the page in a browser."""

import base64
import gzip
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import browser
import numpy as np
import pytest
import viewtools
from runtools import BRIEF, ROOT, SMALL, here, rows, start, timeless, train  # noqa: F401 - a fixture
from waiting import WAIT_S

from cookbook.cli.app import run
from cookbook.cli.view.command import PageHandler
from cookbook.cli.view.page import ViewedRun
from cookbook.data import RenderedPrompt
from cookbook.run.rollout_store import RolloutStore, StepFile
from cookbook.run.stored_steps import ROLLOUTS, StoredSteps, blocks
from cookbook.sampling.rollouts import RolloutGroup


def stored(folder):
    """The lines of each step of a run: the first one, and the groups."""
    with gzip.open(Path(folder) / ROLLOUTS, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps = {}
    for line in lines:
        if "step" in line:
            steps[line["step"]] = (line, [])
        else:
            steps[max(steps)][1].append(line)
    return steps


# ---- the file


def test_steps_are_found_without_reading_them_and_zcat_prints_all(tmp_path):
    file = StepFile(tmp_path / "x.gz", 10_000)
    for step in (1, 2, 5):
        file.append(step, f"text of {step}\n".encode() * step)
    assert [block.step for block in blocks(tmp_path / "x.gz")] == [1, 2, 5]
    text = subprocess.run(["gzip", "-dc", tmp_path / "x.gz"], capture_output=True, check=True).stdout.decode()
    assert text == "".join(f"text of {step}\n" * step for step in (1, 2, 5))
    assert blocks(tmp_path / "missing.gz") == []


def test_the_steps_of_a_file_that_a_live_run_replaces_are_listed_and_read_through_one_handle(tmp_path):
    path = tmp_path / "x.gz"
    file = StepFile(path, 10_000)
    for step in range(1, 9):
        file.append(step, f"text of {step}\n".encode() * step)
    with StoredSteps(path) as stored:
        small = StepFile(path, path.stat().st_size)
        while len(blocks(path)) == 8:
            small.append(10, b"text of 10\n")
        assert [gzip.decompress(stored.member(step)).decode() for step in stored.blocks] == [
            f"text of {step}\n" * step for step in range(1, 9)
        ]
        assert stored.member(10) is None
    # A resumed run cuts the file in place.
    with StoredSteps(path) as stored:
        small.keep_until(3)
        assert [stored.member(step) is None for step in stored.blocks] == [step > 3 for step in stored.blocks]


@pytest.mark.parametrize("lost", [1, 8, 30])
def test_a_member_that_a_kill_cut_short_is_ignored_and_then_removed(tmp_path, lost):
    path = tmp_path / "x.gz"
    file = StepFile(path, 10_000)
    file.append(1, b"one\n")
    whole = path.read_bytes()
    file.append(2, b"two\n")
    path.write_bytes(path.read_bytes()[:-lost])
    assert [block.step for block in blocks(path)] == [1]
    resumed = StepFile(path, 10_000)
    resumed.keep_until(2)
    assert path.read_bytes() == whole
    resumed.append(2, b"two\n")
    assert gzip.decompress(path.read_bytes()) == b"one\ntwo\n"


def test_a_full_file_keeps_evenly_spaced_steps_and_reports_it_once(tmp_path, caplog):
    path = tmp_path / "x.gz"
    random = np.random.default_rng(0)
    texts = {step: random.bytes(60).hex() + "\n" for step in range(1, 101)}
    file = StepFile(path, 1500)
    for step, text in texts.items():
        if step == 60:
            # A resumed run keeps the spacing.
            file = StepFile(path, 1500)
            file.keep_until(59)
        if file.takes(step):
            file.append(step, text.encode())
        assert path.stat().st_size <= 1500
    kept = [block.step for block in blocks(path)]
    every = kept[0]
    assert every > 4 and kept == list(range(every, 101, every)) and len(kept) >= 4
    assert gzip.decompress(path.read_bytes()).decode() == "".join(texts[step] for step in kept)
    assert caplog.text.count("rollout.store_mb") == 1


def test_a_step_larger_than_the_limit_is_left_out(tmp_path, caplog):
    file = StepFile(tmp_path / "x.gz", 200)
    for step in (1, 2):
        file.append(step, np.random.default_rng(step).bytes(400).hex().encode())
    file.append(3, b"small\n")
    assert [block.step for block in blocks(tmp_path / "x.gz")] == [3]
    assert caplog.text.count("step 1 alone needs") == 1 and "step 2" not in caplog.text


def test_one_huge_step_costs_every_second_step_at_most(tmp_path):
    random = np.random.default_rng(0)
    file = StepFile(tmp_path / "x.gz", 2000)
    for step in range(1, 11):
        file.append(step, random.bytes(60).hex().encode())
    file.append(12, random.bytes(1400).hex().encode())
    assert [block.step for block in blocks(tmp_path / "x.gz")] == [2, 4, 6, 8, 10]
    # If steps stay this large, the next one finds space.
    file.append(16, random.bytes(1400).hex().encode())
    assert [block.step for block in blocks(tmp_path / "x.gz")] == [4, 8, 16]


# ---- what runs store


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """A whole run of three steps."""
    out = tmp_path_factory.mktemp("grpo") / "run"
    assert train(*SMALL["grpo"], "checkpoint.every=1", f"out={out}") == 0
    return out


def test_every_rollout_is_stored_with_its_tokens(grpo):
    samples = [row for row in rows(grpo, "samples.jsonl") if row.get("split") != "eval"]
    metrics = {row["step"]: row for row in rows(grpo)}
    trained = 0
    for step, (head, groups) in stored(grpo).items():
        rewards = [[one["reward"] for one in group["trajectories"]] for group in groups]
        assert np.shape(rewards) == (6, 4)
        assert np.mean(rewards) == pytest.approx(metrics[step]["reward/mean"], abs=1e-12)
        firsts = {(row["row"], row["completion"]) for row in samples if row["step"] == step}
        said = set()
        for group in groups:
            for one in group["trajectories"]:
                ((prompt, turn),) = one["branches"]
                assert prompt == {"author": "prompt"} and turn["step"] == step - 1
                assert len(turn["tokens"]) == len(turn["logprobs"]) or len(turn["logprobs"]) == 1
                pieces = [head["pieces"][str(token)] for token in turn["tokens"] if token not in head["special"]]
                said.add((group["row"], "".join(pieces)))
            spread = len({one["reward"] for one in group["trajectories"]}) > 1
            turns = [one["branches"][0][1] for one in group["trajectories"]]
            # A group without spread is not trained on.
            assert all(("advantage" in turn) == spread and ("shift" in turn) == spread for turn in turns)
            if spread:
                trained += 1
                assert sum(turn["advantage"][0] for turn in turns) == pytest.approx(0, abs=1e-3)
                # The embedded sampler agrees with the trainer in float32.
                assert {value for turn in turns for value in turn["shift"]} == {0.0}
        assert firsts <= said
    assert trained > 0


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_resumed_run_stores_the_same_bytes(grpo):
    shutil.copytree(grpo, "run")
    shutil.rmtree("run/checkpoints/step-000003")
    Path("run/status.json").unlink()
    # The killed process had begun to write step 4.
    with Path("run", ROLLOUTS).open("ab") as file:
        file.write((grpo / ROLLOUTS).read_bytes()[:400])
    assert train(*SMALL["grpo"], "checkpoint.every=1", "out=run", "rollout.store_mb=32") == 0
    assert Path("run", ROLLOUTS).read_bytes() == (grpo / ROLLOUTS).read_bytes()


def test_a_resumed_run_that_stores_nothing_drops_the_steps_that_it_repeats(tmp_path):
    store = RolloutStore(viewtools.write_run(tmp_path / "run", 3), None, viewtools.renderer(), pairs=False)
    store.keep_until(2)
    store.write(3)
    assert [block.step for block in blocks(tmp_path / "run" / ROLLOUTS)] == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_store_changes_no_number_and_can_be_switched_off(grpo):
    assert train(*SMALL["grpo"], "checkpoint.every=1", "out=off", "rollout.store_mb=null") == 0
    assert not (Path.cwd() / "off" / ROLLOUTS).exists()
    assert timeless(Path.cwd() / "off") == timeless(grpo)
    assert train(*SMALL["grpo"], "out=bad", "rollout.store_mb=0") == 2


@pytest.mark.usefixtures("here")
def test_sft_stores_rows_with_the_loss_of_every_token():
    assert train(*SMALL["sft"], "recipe.steps=1", "eval.answers=false", "out=run") == 0
    ((head, groups),) = stored("run").values()
    assert len(groups) == 6 and all(group["row"].rpartition(":")[2].isdigit() for group in groups)
    branches = [group["trajectories"][0]["branches"][0] for group in groups]
    data = [part for branch in branches for part in branch if part["author"] == "data"]
    losses = [-value for part in data for value in part["logprobs"]]
    assert np.mean(losses) == pytest.approx(rows("run")[-1]["loss"], abs=1e-4)
    assert [part["author"] for part in branches[0]][:2] == ["context", "data"]
    said = "".join(head["pieces"][str(token)] for token in data[0]["tokens"])
    assert re.fullmatch(r"\d+<\|im_end\|>", said)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_dpo_stores_both_answers_of_a_pair():
    assert train(*SMALL["dpo"], "recipe.steps=1", "out=run") == 0
    ((_, groups),) = stored("run").values()
    assert [[one["side"] for one in group["trajectories"]] for group in groups] == [["chosen", "rejected"]] * 4
    first, second = groups[0]["trajectories"]
    assert first["branches"][0][0]["tokens"] == second["branches"][0][0]["tokens"]


def test_turns_branches_and_numbers_of_each_token(tmp_path):
    ((head, (first, second)),) = stored(viewtools.write_run(tmp_path / "run", 1)).values()
    turns, split, short = first["trajectories"]
    assert (turns["reward"], turns["ended"], turns["calls"], turns["malformed_calls"]) == (1.0, "done", 2, 1)
    assert turns["parts"] == {"correct": 0.8, "format": 0.2} and split["parts"] == {"correct": 0.25, "format": None}
    assert "parts" not in short
    ((prompt, call, answer, final),) = turns["branches"]
    assert [one["author"] for one in (prompt, call, answer, final)] == ["prompt", "model", "environment", "model"]
    assert call["advantage"] == final["advantage"] == [1.5] and call["shift"] == final["shift"] == [0.01]
    assert call["logprobs"][:3] == [-0.5, -0.25, -0.1667]
    assert not {"logprobs", "advantage", "shift"} & answer.keys()
    # Text is stored if the pieces do not spell it: several tokens are one character.
    assert final["text"] == viewtools.HOSTILE and "text" not in call
    assert "".join(head["pieces"][str(token)] for token in call["tokens"]) == "call(3)"
    # Both branches belong to one trajectory, and have its advantage.
    assert [branch[-1]["advantage"] for branch in split["branches"]] == [[-0.5], [-0.5]] and short["ended"] == "length"
    assert split["branches"][1][0]["tokens"] != first["prompt"]
    # The second group was not trained on.
    assert all("advantage" not in one["branches"][0][1] for one in second["trajectories"])


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_killed_run_leaves_a_readable_store(grpo):
    words = [*SMALL["grpo"], "checkpoint.every=1", "recipe.steps=200", f"out={Path.cwd() / 'run'}", *BRIEF]
    process = start(words)
    end = time.monotonic() + 120
    while len(blocks(Path.cwd() / "run" / ROLLOUTS)) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    seen = [block.step for block in blocks(Path.cwd() / "run" / ROLLOUTS)]
    assert seen == list(range(1, len(seen) + 1)) and len(seen) >= 4
    assert train(*words, f"recipe.steps={len(seen) + 1}") == 0
    assert list(stored(Path.cwd() / "run")) == list(range(1, len(seen) + 2))


# ---- the page


def test_the_page_holds_everything_and_names_no_other_place(tmp_path, capsys):
    folder = viewtools.write_run(tmp_path / "run")
    assert run(["view", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{folder / 'view.html'}: 3 steps, ")
    text = (folder / "view.html").read_text()
    # The only address is the name of SVG, which is not loaded.
    assert set(re.findall(r"https?://[^\s\"']*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|script|img)[^>]*\b(src|href)=(?!\"data:,)", text)
    data = dict(re.findall(r'<script type="text/plain" id="([\w-]+)">([\w+/=]+)</script>', text))
    facts = json.loads(gzip.decompress(base64.b64decode(data.pop("facts"))))
    assert list(data) == ["run0-step1", "run0-step2", "run0-step3"]
    packed = b"".join(base64.b64decode(one) for one in data.values())
    assert packed == (folder / ROLLOUTS).read_bytes()
    assert facts[0]["config"]["recipe.name"] == "grpo" and facts[0]["steps"] == [1, 2, 3]
    assert facts[0]["metrics"] == (folder / "metrics.jsonl").read_text()


def test_two_runs_and_another_file(tmp_path):
    first, second = viewtools.write_run(tmp_path / "a", 1), viewtools.write_run(tmp_path / "b", 2)
    assert run(["view", str(first), str(second), "--out", str(tmp_path / "both.html")]) == 0
    names = re.findall(r'id="(run\d-step\d)"', (tmp_path / "both.html").read_text())
    assert names == ["run0-step1", "run1-step1", "run1-step2"]


def test_a_damaged_store_is_reported(tmp_path, capsys):
    folder = viewtools.write_run(tmp_path / "a", 2)
    with (folder / ROLLOUTS).open("ab") as file:
        file.write(b"hello")
    assert run(["view", str(folder)]) == 0
    said = capsys.readouterr()
    assert "2 steps" in said.out and "a/rollouts.jsonl.gz: the last 5 bytes are not a whole step" in said.err
    (folder / ROLLOUTS).write_bytes((folder / ROLLOUTS).read_bytes()[:-5])
    assert run(["view", str(folder)]) == 0 and capsys.readouterr().err == ""


def test_errors_are_one_line(tmp_path, capsys):
    folder = str(viewtools.write_run(tmp_path / "a", 1))
    for words, message in [
        ([str(tmp_path)], "is not a run (no config.yaml)"),
        ([folder] * 3, "expected one run or two, got 3"),
        ([folder, "--out", str(tmp_path / "no/where.html")], "No such file or directory; choose another file with --out"),
        ([folder, "--serve", "--out", "x.html"], "--serve writes no file, got --out x.html; remove one"),
        ([folder, "--port", "0"], "got --port 0; add --serve or remove --port"),
    ]:
        assert run(["view", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: view: ") and message in error and error.count("\n") == 1


def test_the_command_loads_no_torch():
    code = "from cookbook.cli.view import command; import sys; print({'torch', 'transformers', 'omegaconf'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout == "set()\n"
    )


@contextmanager
def served(*folders):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PageHandler, [ViewedRun(folder) for folder in folders]))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(port, path, host="127.0.0.1"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_server_gives_news_and_nothing_else(tmp_path):
    folder = viewtools.write_run(tmp_path / "run", 2)
    with served(folder) as port:
        status, page = get(port, "/")
        assert status == 200 and b"<!-- data -->" in page and b"/* program */" not in page
        first = json.loads(get(port, "/facts")[1])[0]
        assert first["steps"] == [1, 2] and first["metrics"].count("\n") == 2
        viewtools.add_step(folder, 3)
        # The row of a live run may be incomplete.
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "lo')
        news = json.loads(get(port, f"/facts?metrics={first['metricsEnd']}")[1])[0]
        assert news["steps"] == [1, 2, 3] and json.loads(news["metrics"])["step"] == 3
        assert json.loads(get(port, f"/facts?metrics={news['metricsEnd']}")[1])[0]["metrics"] == ""
        # A resumed run has replaced the file.
        copy = folder / "copy"
        copy.write_text((folder / "metrics.jsonl").read_text())
        copy.rename(folder / "metrics.jsonl")
        assert json.loads(get(port, f"/facts?metrics={news['metricsEnd']}")[1])[0]["metrics"].count("\n") == 3
        step = get(port, "/run/0/step/2")[1]
        assert gzip.decompress(step).startswith(b'{"step":2,') and step in (folder / ROLLOUTS).read_bytes()
        for path in ("/run/0/step/9", "/run/1/step/1", "/run/0/step/x", "/../config.yaml", "/config.yaml"):
            assert get(port, path)[0] == 404
        assert get(port, "/facts", host="evil.example")[0] == 403


def test_a_client_that_closes_its_connection_leaves_no_trace(tmp_path):
    client, connection = socket.socketpair()
    with client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with connection:
        PageHandler([ViewedRun(viewtools.write_run(tmp_path / "run", 1))], connection, ("127.0.0.1", 0), None)


# ---- the page in a browser


@pytest.fixture(scope="module")
def tab():
    if browser.program() is None:
        pytest.skip("no browser on this machine; install one, for example: apt-get install chromium")
    with browser.page() as page:
        yield page


@pytest.mark.slow
def test_from_step_to_token(tab, tmp_path):
    folder = viewtools.write_run(tmp_path / "run")
    assert run(["view", str(folder)]) == 0
    tab.requests.clear()
    tab.open((folder / "view.html").as_uri())
    assert tab.texts(".group .question") == ["Guess a number: "] * 2 and tab.texts(".note") == [
        "step 3: 6 of 6 match, in 2 groups"
    ]
    tab.click(".group")
    # Every author is a part of the first trajectory, and text of a run never becomes a tag.
    labels = tab.texts(".trajectory[open] .segment .label")
    assert [label.split(" · ")[0] for label in labels] == ["model", "environment", "model"]
    assert tab.texts(".trajectory[open] .segment .text")[2] == viewtools.HOSTILE
    assert tab.run("document.querySelectorAll('main img').length") == 0
    summary = tab.texts(".trajectory summary")[0]
    assert all(
        part in summary
        for part in ("reward 1", "advantage 1.5", "ended: done", "calls: 2", "malformed calls: 1", "correct 0.8", "format 0.2")
    )
    # Colors: an advantage of 1.5 is the largest; a negative one is red; the environment has none.
    color = "getComputedStyle(document.querySelector('.trajectory[open] .{} .token')).backgroundColor"
    assert tab.run(color.format("model")) == "rgba(22, 163, 74, 0.85)"
    assert tab.run(color.format("environment")) == "rgba(0, 0, 0, 0)"
    tab.click(".pip", 1)
    assert tab.run(color.format("model")) == "rgba(220, 38, 38, 0.282)"
    tab.change("color", "logprobs", "change")
    assert tab.run(color.format("model")) == "rgba(234, 88, 12, 0.106)"
    tab.change("color", "shift", "change")
    assert tab.run(color.format("model")) == "rgba(124, 58, 237, 0.85)"
    tab.run(
        "document.querySelector('.trajectory[open] .model .token').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    tip = tab.texts("#tip")[0]
    assert (
        tip.startswith('"c"  token ')
        and "probability 60.65%" in tip
        and "minus sampler 0.01" in tip
        and "advantage -0.5" in tip
    )
    # The page asked for itself only. The live page of an earlier test may ask its server until this one is open.
    asked = {address.partition("#")[0] for address in tab.requests if not address.startswith("http://127.0.0.1:")}
    assert asked <= {"about:blank", (folder / "view.html").as_uri(), "data:,"}
    assert tab.errors == []


@pytest.mark.slow
def test_filters_search_and_steps(tab, tmp_path):
    folder = viewtools.write_run(tmp_path / "run")
    assert run(["view", str(folder)]) == 0
    tab.open((folder / "view.html").as_uri())
    tab.change("low", "0.2")
    assert tab.texts(".note") == ["step 3: 4 of 6 match, in 2 groups"]
    tab.change("high", "0.5")
    assert tab.texts(".note") == ["step 3: 2 of 6 match, in 2 groups"]
    # The trajectory that matches is open, and the others are pale.
    assert "reward 0.25" in tab.texts(".trajectory[open] summary")[0] and len(tab.texts(".trajectory.out")) == 2
    tab.change("low", "")
    tab.change("high", "")
    tab.change("search", "NO IDEA")
    assert tab.texts(".note") == ["step 3: 2 of 6 match, in 2 groups"]
    tab.click(".group")
    assert "".join(tab.texts(".token.found")) == "no idea"
    tab.change("search", "games.jsonl:2")
    assert tab.texts(".note") == ["step 3: 0 of 6 match, in 0 groups"]
    tab.click("#everywhere")
    assert tab.texts(".note") == ["all steps: 3 of 18 match, in 1 groups"] and "step 2" in tab.texts(".group")[0]
    tab.click(".group")
    assert tab.run("document.getElementById('step').value") == "2"
    tab.click("#everywhere")
    tab.change("search", "")
    tab.click("#earlier")
    assert tab.run("location.hash").startswith("#step=1&") and "step 1: 6 of 6" in tab.texts(".note")[0]
    tab.run("document.getElementById('metric-filter').value = 'mean'; document.getElementById('metric-filter').oninput()")
    assert tab.texts(".chart .name > :first-child")[0] == "reward/mean" and len(tab.texts(".chart")) == 1
    assert tab.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2])
def test_a_phone_shows_one_column(tmp_path, tab, runs):
    del tab
    folders = [viewtools.write_run(tmp_path / name) for name in ("first", "second")[:runs]]
    # Rows of an environment have no prompt: the list shows the first observation.
    store = RolloutStore(folders[0], 1.0, viewtools.renderer(), pairs=False)
    shown = viewtools.group(viewtools.renderer())
    row = RenderedPrompt([], shown.prompt.row, "", "")
    store.sampled([RolloutGroup(row, shown.trajectories, shown.rewards, parts=shown.parts)])
    store.write(4)
    assert run(["view", *map(str, folders), "--out", str(tmp_path / "view.html")]) == 0
    with browser.page(390, 844) as phone:
        phone.open((tmp_path / "view.html").as_uri())
        assert phone.texts(".group .question")[0] == "Guess a number: "
        assert phone.run("document.documentElement.scrollWidth") == 390
        widths = phone.run("[...document.querySelectorAll('.list, .detail')].map(one => one.offsetWidth)")
        assert len(widths) == 2 * runs and min(widths) > 350 and phone.errors == []


@pytest.mark.slow
def test_two_runs_are_shown_side_by_side(tab, tmp_path, grpo):
    first, second = viewtools.write_run(tmp_path / "a", 3), viewtools.write_run(tmp_path / "b", 2)
    assert run(["view", str(first), str(second), "--out", str(tmp_path / "both.html")]) == 0
    tab.open((tmp_path / "both.html").as_uri())
    # The second run has no step 3.
    assert [note.split(":")[0] for note in tab.texts(".note")] == ["a step 3", "b step 2"]
    assert "step 2, the nearest stored step" in tab.texts(".detail .facts")[-4] + "".join(tab.texts(".detail > .facts"))
    tab.click(".run:nth-child(2) .group")
    assert tab.texts(".detail h2") == ["games.jsonl:7", "games.jsonl:7"]
    tab.run("document.getElementById('settings').open = true")
    assert tab.texts("#config tr") == ["seed32"]
    assert tab.run("document.querySelectorAll('.chart polyline').length") == 4
    # A real run, with rows that the other lacks.
    assert run(["view", str(grpo), str(second), "--out", str(tmp_path / "real.html")]) == 0
    tab.open((tmp_path / "real.html").as_uri())
    assert tab.texts(".note")[0].endswith("24 of 24 match, in 6 groups") and tab.errors == []


@pytest.mark.slow
def test_a_live_run_is_followed(tab, tmp_path):
    folder = viewtools.write_run(tmp_path / "run", 1)
    with served(folder) as port:
        tab.open(f"http://127.0.0.1:{port}/")
        assert tab.texts(".note") == ["step 1: 6 of 6 match, in 2 groups"]
        viewtools.add_step(folder, 2)
        tab.wait("document.querySelector('.note').textContent.startsWith('step 2: 6 of 6')")
        assert tab.run("document.querySelectorAll('.chart polyline')[0].points.length") == 2
        # A reader of an earlier step is left there.
        tab.click("#earlier")
        viewtools.add_step(folder, 3)
        tab.wait("document.getElementById('slider').max === '2'")
        assert tab.texts(".note")[0].startswith("step 1:")
    assert tab.errors == []


@pytest.mark.slow
def test_a_run_without_a_store_shows_its_metrics(tab, tmp_path):
    folder = viewtools.write_run(tmp_path / "run", 2)
    (folder / ROLLOUTS).unlink()
    assert run(["view", str(folder)]) == 0
    tab.open((folder / "view.html").as_uri())
    assert "no stored rollouts or rows" in tab.texts(".note")[0] and len(tab.texts(".chart")) == 2 and tab.errors == []
