"""Linux and macOS: what only Linux has is used behind a question for the system. These tests run on Linux and take it away."""

from __future__ import annotations

import re
import sys

import preloaded
import pytest

from cookbook.utils import paths

LINUX_ONLY = re.compile(r"sched_getaffinity|fdatasync|/proc/|epoll|memfd_|prctl|posix_fadvise|pidfd|import fcntl|CDLL\(None\)")
# With a question for sys.platform, or for the attribute, in the same function.
ASKED_FOR = {
    "utils/files.py": {"import fcntl", "posix_fadvise"},  # F_FULLFSYNC of macOS
    "checkpoints/tensor_digests.py": {"sched_getaffinity"},
    "deployments/vllm/process.py": {"/proc/"},
    "engine/memory.py": {"CDLL(None)"},
    "utils/freed_memory.py": {"CDLL(None)"},
}


def test_what_only_linux_has_is_asked_for():
    found = {}
    for path in sorted(paths.PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if names := set(LINUX_ONLY.findall(text)):
            found[str(path.relative_to(paths.PACKAGE))] = names
            assert "sys.platform" in text
    assert found == ASKED_FOR


# Imports first: torch itself looks at the platform.
ELSEWHERE = """
import fcntl, os, resource, sys
import torch, transformers, datasets, peft
import cookbook.backends.local.trainer
import cookbook.checkpoints.sampler_checkpoints
import cookbook.cli.app
import cookbook.engine.memory
import cookbook.run.builder
for name in ("sched_getaffinity", "sched_setaffinity", "fdatasync", "posix_fadvise", "memfd_create"):
    delattr(os, name)
fcntl.F_FULLFSYNC = 51
real_open = open
def no_proc(path, *args, **kwargs):
    assert not str(path).startswith("/proc/"), path
    return real_open(path, *args, **kwargs)
import builtins, io
builtins.open = io.open = no_proc
import psutil
psutil.virtual_memory = lambda: type("Memory", (), {"available": 8 << 30, "total": 16 << 30})()
sys.platform = "darwin"
for command in sys.argv[1:]:
    if code := cookbook.cli.app.run(command.split()):
        sys.exit(code)
"""


@pytest.mark.slow
def test_a_run_trains_and_resumes_without_what_only_linux_has(tmp_path):
    train = "train recipe=grpo eval.limit=4 recipe.prompts_per_step=2 out=run checkpoint.every=1 recipe.steps="
    commands = [f"{train}1", f"{train}2", "weights list run"]
    done = preloaded.run(*commands, code=ELSEWHERE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == ["step-000001", "step-000002"]


def test_vllm_servers_say_that_they_need_linux(monkeypatch):
    from cookbook.deployments.vllm import process
    from cookbook.errors import ConfigError

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"^deployment: .* Linux only; .* deployment\.url="):
        process.check_python(sys.executable)


def test_windows_is_refused_in_one_line(monkeypatch, capsys):
    from cookbook.cli import app

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "argv", ["cookbook", "list"])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: cookbook runs on Linux and macOS; on Windows, install it in WSL (wsl --install)\n"
