"""``cookbook chat``: as a filter, and in a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runtools import ROOT, SMALL, here, train  # noqa: F401 - here is a fixture
from waiting import WAIT_S

from cookbook.cli import chat
from cookbook.cli.app import run
from cookbook.run import builder

TINY = str(ROOT / "data" / "tiny")


class Terminal(io.StringIO):
    """Standard output of a terminal, in which Ctrl-C is pressed while the part of an answer with that number is printed."""

    interrupt_at = 0
    parts = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        self.parts += 1
        if self.parts == self.interrupt_at:
            raise KeyboardInterrupt
        return written


def plain(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_line_in_an_answer_out(monkeypatch, capsys):
    plain(monkeypatch, "26+10=", "", "/system", "26+10=")
    assert run(["chat", "tiny"]) == 0
    first, system, again = capsys.readouterr().out.splitlines()
    assert (first, system) == (again, "new conversation")
    assert [first] == builder.sample("tiny", "26+10=")


@pytest.mark.slow
def test_the_conversation_is_the_prompt(monkeypatch, capsys):
    seen = []
    original = chat.Renderer.prompt_tokens
    monkeypatch.setattr(chat.Renderer, "prompt_tokens", lambda self, given: seen.append(given) or original(self, given))
    plain(monkeypatch, "1+1=", "2+2=")
    assert run(["chat", "tiny", "--system", "Add.", "--max-tokens", "3"]) == 0
    first, _second = capsys.readouterr().out.splitlines()
    head = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert seen == [head, [*head, {"role": "assistant", "content": first}, {"role": "user", "content": "2+2="}]]


@pytest.mark.slow
def test_checkpoints_and_the_base_model(here, monkeypatch, capsys):  # noqa: F811
    assert train(*SMALL["sft"], "model.random=false", "optim.lr=0.01", "checkpoint.every=1", "out=mine") == 0
    steps = [str(path) for path in sorted((here / "mine" / "checkpoints").iterdir())]
    assert len(steps) >= 2
    capsys.readouterr()
    first = str(int(steps[0][-6:]))
    expected = [builder.sample(name, "26+10=", max_tokens=8)[0] for name in (steps[-1], TINY, steps[0], TINY)]
    plain(monkeypatch, "/checkpoint", "26+10=", f"/checkpoint {first}", "/system", "26+10=", "/base", "/system", "26+10=")
    assert run(["chat", "mine", "--base", "--max-tokens", "8"]) == 0
    names = [Path(step).name for step in steps]
    assert capsys.readouterr().out.splitlines() == [
        ", ".join(names), f"{names[-1]}: {expected[0]}", f"base: {expected[1]}", f"now {names[0]}", "new conversation",
        f"{names[0]}: {expected[2]}", f"base: {expected[3]}", f"now {names[0]}", "new conversation", expected[2],
    ]  # fmt: skip
    assert expected[0] != expected[1]
    for line, error in [
        ("/checkpoint 99", "error: chat: no checkpoint of step '99'; choose one of "),
        ("/chekpoint", "error: chat: unknown command '/chekpoint'; expected one of /checkpoint, /base"),
    ]:
        plain(monkeypatch, line)
        assert run(["chat", "mine"]) == 2
        assert capsys.readouterr().err.startswith(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, line, error",
    [
        (["--base"], "", "is not a checkpoint of a run, so it has no base model; leave out --base"),
        ([], "/checkpoint", "tiny is not a run, so there is no other checkpoint; start cookbook chat RUN"),
        ([], "1" * 20_000, "start a new conversation with /system"),
    ],
)
def test_what_a_filter_refuses(words, line, error, monkeypatch, capsys):
    plain(monkeypatch, line)
    assert run(["chat", "tiny", *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_an_error_does_not_end_the_conversation(monkeypatch, capsys):
    lines = iter(["26+10=", "/no", "26+10="])
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stdin", Terminal())
    talk = chat.ChatSession(TINY, chat.ChatOptions())
    monkeypatch.setattr(chat, "ChatSession", lambda target, options: talk)

    def typed(prompt: str) -> str:
        # The first part of the first answer.
        screen.interrupt_at = 0 if screen.interrupt_at else screen.parts + 1
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    chat.run(TINY, chat.ChatOptions())
    assert " (stopped)\n" in screen.getvalue() and "unknown command '/no'" in capsys.readouterr().err
    roles = [one["role"] for one in talk.models[0].messages]
    assert roles == ["user", "assistant"] * 2
    assert 0 < len(talk.models[0].messages[1]["content"]) < len(builder.sample("tiny", "26+10=")[0])


@pytest.mark.nightly
def test_a_real_terminal():
    """The command in a terminal of its own: a banner, an answer, Ctrl-C at the prompt drops the line, Ctrl-D ends."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    command = [sys.executable, "-m", "cookbook", "chat", "tiny"]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True, close_fds=True
    )
    os.close(follower)
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + 100
        while text not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([leader], [], [], 1)[0]:
                shown += os.read(leader, 4096).decode()

    try:
        until("> ")
        assert "/quit: end" in shown
        shown = ""
        os.write(leader, b"26+10=\n")
        until(builder.sample("tiny", "26+10=")[0])
        until("> ")
        shown = ""
        os.write(leader, b"half")
        until("half")
        # Python's readline notices no signal while it reads a key.
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        until("> ")
        os.write(leader, b"\x04")
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
