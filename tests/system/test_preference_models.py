"""From pairs to a policy: a preference model by SFT, GRPO by its win rates, resume, servers, check config and plan."""

from pathlib import Path

import pytest
import servertools
import tiny
from runtools import bits, checkpoint, here, rows, timeless, train  # noqa: F401 - here is a fixture

from cookbook.cli.app import run

pytestmark = pytest.mark.usefixtures("here")
SFT = ["recipe=sft", "data=arithmetic_pairs", "data.format=comparisons", "data.limit=16", "eval.limit=2", "recipe.batch_size=8"]
GRPO = ["recipe=grpo", "data=arithmetic_pairs", "data.limit=16", "eval.limit=2", "recipe.prompts_per_step=4"]
LITTLE = [*GRPO, "recipe.group_size=3", "recipe.steps=2", "rollout.max_tokens=6", "eval.max_tokens=6", "reward=compare"]


def save(name, seed):
    """A tiny model whose context holds a comparison."""
    folder = tiny.save(Path(name), seed=seed, max_position_embeddings=256)
    tiny.byte_tokenizer(256).save_pretrained(folder)
    return folder


def same(one, other):
    """Whether two runs have the same numbers, up to one rounding of a client. The checksum has the name of the reward model."""
    pairs = [[{**row, "eval/crc32": 0.0} for row in timeless(name)] for name in (one, other)]
    return all(a == pytest.approx(b, rel=1e-15, abs=0) for a, b in zip(*pairs, strict=True))


@pytest.fixture
def policy(here):  # noqa: F811
    return save("policy", 1)


@pytest.fixture
def preferences(here):  # noqa: F811
    return save("preferences", 2)


@pytest.mark.slow
def test_from_pairs_to_a_policy_and_resumed_exactly(policy, preferences, capsys):
    assert train(*SFT, f"model.name={preferences}", "recipe.steps=2", "optim.lr=0.01", "out=compared") == 0
    words = [*LITTLE, f"model.name={policy}", "reward.model=compared", "eval.every=null", "checkpoint.every=1"]
    assert train(*words, "out=whole") == 0
    found = rows("whole")
    assert [row["reward/mean"] for row in found[1:]] == pytest.approx([0.5, 0.5])
    assert found[1]["reward/group_std"] > 0 and 0 < found[0]["eval/reward"] < 1
    assert train(*words, "out=parts", "recipe.steps=1") == train(*words, "out=parts") == 0
    assert timeless("whole")[-1] == timeless("parts")[-1] and bits(checkpoint("whole")) == bits(checkpoint("parts"))
    # Other weights of the same name.
    assert train(*SFT, f"model.name={preferences}", "recipe.steps=3", "optim.lr=0.01", "out=compared") == 0
    capsys.readouterr()
    assert train(*words, "out=parts", "recipe.steps=3") == 2
    assert "reward.model: the digest of its weights: the run that saved" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_trains_and_serves_the_preference_model(policy, preferences):
    """The preference model is a run on a server; the policy trains in this process, then on the server."""
    with servertools.running(preferences, Path("server"), names=["wise"]) as server:
        remote = ["backend=remote", f"backend.base_url={server.url}", "model.dtype=float32"]
        sft = [*SFT, f"model.name={preferences}", "model.dtype=float32", "recipe.steps=2", "optim.lr=0.01"]
        assert train(*sft, *remote, "out=compared") == 0
        assert train(*sft, "out=compared_here") == 0
        words = [*LITTLE, "model.dtype=float32"]
        # The address is that of the run's checkpoints.
        assert train(*words, f"model.name={policy}", "reward.model=compared", "out=there") == 0
        assert train(*words, f"model.name={policy}", "reward.model=compared_here", "out=here") == 0
        assert same("here", "there")
        # A policy on the server, with the preference model of this machine, of the server, and a name of the server.
        on_server = [*LITTLE, *remote, f"model.name={preferences}"]
        assert train(*on_server, "reward.model=compared", "out=both") == 0
        assert train(*on_server, "reward.model=compared_here", "out=mixed") == 0
        assert same("both", "mixed")
        assert train(*on_server, "reward.model=wise", "recipe.steps=1", "out=named") == 0


def test_check_config_and_plan_know_the_second_model(policy, preferences, capsys):
    words = [*LITTLE, f"model.name={policy}", f"reward.model={preferences}"]
    assert run(["check", "config", *words]) == 0
    assert "reward model preferences compares the completions of a group; frozen" in " ".join(capsys.readouterr().out.split())
    assert run(["plan", *words]) == 0
    with_model = capsys.readouterr().out
    assert run(["plan", *[word for word in words if not word.startswith("reward")], "reward=exact"]) == 0
    assert with_model != capsys.readouterr().out


REFUSED = [
    (["reward.model=./nowhere"], "reward.model: no such folder './nowhere'; pass a local folder or a Hugging Face hub id"),
    ([], "reward.model: missing"),
    (["reward.model=preferences", "reward.against=gold"], 'reward.against: held-out rows have no column "gold"'),
    (
        ["reward.model=tinker://a:train:0/weights/b"],
        "reward.model: tinker://a:train:0/weights/b is a checkpoint on a server; set",
    ),
    (
        ["reward.model=preferences", "backend.ranks=2"],
        "reward.model: a reward model is loaded into this process, and the model",
    ),
    (["reward.model=preferences", "reward.workers=2"], "reward.workers=2: the reward model has its own thread"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) or "missing" for words, _ in REFUSED])
def test_mistakes_are_one_line(policy, preferences, words, message, capsys):
    assert run(["check", "config", *LITTLE, f"model.name={policy}", *words]) == 2
    assert message in capsys.readouterr().err
