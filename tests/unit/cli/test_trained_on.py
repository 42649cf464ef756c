"""A run stores whether it was trained on conversations or on texts, and sampling from it uses the same form."""

import json
from pathlib import Path

import pytest
from runtools import SMALL, checkpoint, here, train  # noqa: F401 - here is a fixture

from cookbook.checkpoints import manifest
from cookbook.cli import chat
from cookbook.cli.app import run
from cookbook.data import Renderer
from cookbook.errors import ConfigError
from cookbook.run import builder

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def prompts(monkeypatch) -> list[object]:
    """The prompts that are rendered."""
    found: list[object] = []
    own = Renderer.prompt_tokens

    def recorded(self, prompt, *arguments):
        found.append(prompt)
        return own(self, prompt, *arguments)

    monkeypatch.setattr(Renderer, "prompt_tokens", recorded)
    return found


def test_a_run_of_texts_is_sampled_as_text(prompts):
    Path("texts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(8))
    )
    assert train(*SMALL["sft"], "recipe.steps=1", "data=texts.jsonl", "out=text") == 0
    saved = checkpoint("text")
    assert manifest.trained_on(manifest.read(saved)) == ["text"]
    assert run(["weights", "export", str(saved), "made"]) == 0 and manifest.is_of_text(Path("made"))
    builder.sample(str(saved), "1+1=", max_tokens=1)
    assert prompts == ["1+1="]
    with pytest.raises(
        ConfigError, match="was trained on texts without a chat template; complete plain text with: cookbook sample"
    ):
        chat.ChatModel("text", str(saved), chat.ChatOptions())


def test_a_run_of_conversations_is_sampled_as_a_conversation(prompts):
    assert train(*SMALL["sft"], "recipe.steps=1", "out=chat") == 0
    assert manifest.trained_on(manifest.read(checkpoint("chat"))) == ["chat"]
    builder.sample(str(checkpoint("chat")), "1+1=", max_tokens=1)
    assert prompts == [[{"role": "user", "content": "1+1="}]]
