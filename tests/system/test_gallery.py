"""The experiments of the gallery: each has a section with its command, and runs for three steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from exampletools import example, judge
from marks import rotating
from places import ROOT
from runtools import here, rows, train  # noqa: F401 - here is a fixture
from transformers import AutoTokenizer

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat
from cookbook.data.messages import ChatMessage
from cookbook.sampling.environments import PythonEnvironment
from cookbook.sampling.environments.conversation import Conversation
from cookbook.sampling.environments.instance import Instance
from cookbook.types import Sample

NAMES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
# On top of debug=fast: few prompts, no evaluation of long answers; for the real model, the shipped one in its place.
LITTLE = ["debug=fast", "data.limit=24", "eval.limit=2", "rollout.max_tokens=16", "eval.max_tokens=16"]
SHIPPED = ["model=tiny", "data=arithmetic"]
CALCULATOR = f"{ROOT / 'examples' / 'calculator.py'}:Calculator"
TOOLS = f"model.chat_template={ROOT / 'examples' / 'calculator.jinja'}"


def test_every_experiment_has_a_section_with_its_command() -> None:
    page = (ROOT / "docs/evidence/gallery.md").read_text(encoding="utf-8")
    assert len(NAMES) >= 8
    for name in NAMES:
        assert f"$ cookbook train experiment={name}\n" in page
        assert f"| [`{name}`](#" in page
        # grpo_gsm8k needs a download and a GPU; of sft_gsm8k, only the start has been measured.
        assert name in ("grpo_gsm8k", "sft_gsm8k") or f"![Curves of {name}](" in page


@contextmanager
def needed(name: str, folder: Path) -> Iterator[list[str]]:
    """Yield the overrides of an experiment that needs a service, or a download."""
    if name == "grpo_judge":
        with judge() as url:
            yield [f"reward.url={url}", "reward.cache=null"]
    elif name == "grpo_remote":
        pytest.importorskip("tinker")
        import servertools

        with servertools.running(ROOT / "data" / "tiny", folder / "server") as server:
            yield [f"backend.base_url={server.url}"]
    elif name == "sft_distill":
        example("teacher").main(str(ROOT / "data" / "tiny"), Path("teacher.jsonl"), limit=24)
        yield []
    elif name == "sft_tools":
        example("calculator").main(Path("calls.jsonl"), limit=24)
        yield [TOOLS]
    elif name == "grpo_tools":
        # The shipped model before sft_tools has no right answer under this template, so that GRPO would have no gradient.
        Path("length.py").write_text("def reward(completion, row): return len(completion) % 5 / 5")
        yield [f"model.name={ROOT / 'data' / 'tiny'}", TOOLS, f"env.target={CALCULATOR}", "reward=length.py:reward"]
    elif name == "sft_orders":
        example("orders").main(training=24, held_out=4)
        yield [f"model.name={ROOT / 'data' / 'tiny'}"]
    elif name == "sft_gsm8k":
        rows = ROOT / "data" / "arithmetic"
        files = [f"data.path={rows / 'gsm8k_train.jsonl'}", f"data.eval_path={rows / 'gsm8k_eval.jsonl'}"]
        yield [f"model.name={ROOT / 'data' / 'tiny'}", *files, "data.eval_split=null", "data.eval_fraction=0"]
    elif name == "grpo_two_digits":
        # The real model is trained by tests/system/real_model.
        yield [f"model.name={ROOT / 'data' / 'tiny'}", "data=arithmetic", "optim.lr=1e-4"]
    else:
        if name == "grpo_chain_sum":
            pytest.importorskip("reasoning_gym")
        yield SHIPPED if name == "grpo_gsm8k" else []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", rotating(NAMES, 3))
def test_an_experiment_runs(name: str, tmp_path: Path) -> None:
    sizes = ["recipe.prompts_per_step=4"] if name.startswith("grpo") else ["recipe.batch_size=4"]
    limit = [word for word in LITTLE if not (name == "grpo_second_try" and word.startswith("data.limit"))]
    with needed(name, tmp_path) as words:
        assert train(f"experiment={name}", *limit, *sizes, *words, "out=run") == 0
    assert [row["step"] for row in rows("run") if row["step"]] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_answers_of_a_teacher_are_those_of_its_newest_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("recipe=grpo", *LITTLE, "recipe.prompts_per_step=4", "out=run") == 0
    example("teacher").main("run", Path("teacher.jsonl"), limit=3)
    conversations = [json.loads(line)["messages"] for line in Path("teacher.jsonl").read_text().splitlines()]
    assert [user["content"] for user, _ in conversations] == ["27+10=", "48+25=", "21+2="]
    for user, assistant in conversations:
        capsys.readouterr()
        assert run(["sample", "run", user["content"]]) == 0
        assert capsys.readouterr().out.strip() == assistant["content"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("number", [0, 1], ids=["a call", "no call"])
def test_a_conversation_about_the_calculator_has_the_tokens_of_an_episode(number: int) -> None:
    example("calculator").main(Path("calls.jsonl"), limit=2)
    row = json.loads(Path("calls.jsonl").read_text().splitlines()[number])
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny")
    tokenizer.chat_template = (ROOT / "examples" / "calculator.jinja").read_text()
    text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    answers = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]

    contract = PythonEnvironment(target=CALCULATOR).contract
    episode = Instance(example("calculator").Calculator(), contract)
    question = Chat("", (ChatMessage("user", row["messages"][0]["content"]),), start=1)
    prompt = RenderedPrompt([], Row("", {}), "", "", question)
    talk = Conversation(Renderer(tokenizer, 256), prompt, episode.reset(row, 0).observation, contract.tools)
    for answer in answers:
        tokens = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        reply = episode.act(talk.add(Sample(tokens, [-0.5] * len(tokens), "stop", 0)).text)
        if not reply.done:
            talk.observe(reply.observation or "")
    assert reply.done and len(answers) == (2 if number == 0 else 1) and len(talk.branches) == 1
    assert tokenizer.decode(talk.tokens) + "\n" == text


def test_orders_are_valid_and_held_out_ones_are_new(tmp_path: Path) -> None:
    example("orders").main(tmp_path)
    train_rows, held_out = (
        [json.loads(line)["messages"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("orders.jsonl", "orders_held_out.jsonl")
    )
    assert (len(train_rows), len(held_out)) == (160, 60)
    for messages in [*train_rows, *held_out]:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        order, *changed = (json.loads(message["content"]) for message in messages[1::2])
        assert all(str(value) in messages[0]["content"] for value in order.values())
        assert all(
            one | {"count": 0} == order | {"count": 0} and str(one["count"]) in messages[2]["content"] for one in changed
        )
    customers, others = (
        {json.loads(messages[1]["content"])["customer"] for messages in rows} for rows in (train_rows, held_out)
    )
    assert not customers & others


@pytest.mark.parametrize(
    ("answer", "grade"), [("36", 10), ("about 40", 6), ("it is 26 or 36", 10), ("90", 0), ("none", 0)], ids=str
)
def test_the_substitute_judge_grades_the_last_number(answer: str, grade: int) -> None:
    question = f"<prompt>\n26+10=\n</prompt>\n<answer>\n{answer}\n</answer>\nEnd with 'Score: N', from 0 to 10."
    assert example("rule_judge").grade(question) == grade
