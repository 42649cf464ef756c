"""``cookbook check data`` and ``check config``: what a run would train and do, said without training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from tiny import byte_tokenizer

from cookbook.check.dataset import TextSpan, WeightedSequence, lengths, survey, text_spans
from cookbook.cli import check_data
from cookbook.cli.app import run
from cookbook.cli.check_config import plan
from cookbook.cli.hydra.bridge import ComposeRequest, show
from cookbook.data import DataConfig, Renderer, Row

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer(), max_length=40)


def rows(*values) -> list[Row]:
    return [Row(f"train.jsonl:{number}", value) for number, value in enumerate(values, start=1)]


def text(renderer, one: WeightedSequence) -> str:
    return "".join(piece.text if piece.weight else "." for piece in text_spans(renderer.tokenizer, one.tokens, one.weights))


# What the rows become


def test_a_survey_of_conversations(renderer):
    data = rows(
        {"messages": [USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant"}]},
        {"messages": [USER, {**ANSWER, "content": "4" * 40}]},
        {"messages": [USER, {**ANSWER, "weight": 0}]},
        {"messages": [USER, {**ANSWER, "content": "5", "weight": 0.5}]},
    )
    found = survey("conversations", data, renderer, DataConfig(on_long="skip"), 0)
    assert (found.num_rows, found.num_used) == (6, 2)
    assert [one.where for one in found.sequences] == ["train.jsonl:1", "train.jsonl:6"]
    assert [text(renderer, one).strip(".") for one in found.sequences] == ["4<|im_end|>", "5<|im_end|>"]
    assert found.sequences[1].num_trained == 2 and set(found.sequences[1].weights) == {0.0, 0.5}
    reasons = {refusal.reason.partition(": ")[0]: refusal.fatal for refusal in found.refused}
    assert reasons == {f"train.jsonl:{n}": fatal for n, fatal in ((2, True), (3, True), (4, False), (5, True))}


def test_a_row_the_template_refuses_does_not_hide_the_others():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    tokenizer.chat_template += "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    data = rows(*({"messages": [{**USER, "content": content}, ANSWER]} for content in ("a", "no", "b")))
    found = survey("conversations", data, Renderer(tokenizer), DataConfig(), 0)
    assert [one.where for one in found.sequences] == ["train.jsonl:1", "train.jsonl:3"]
    [refusal] = found.refused
    assert refusal.reason.startswith("train.jsonl:2: the chat template rejects the row: not this") and refusal.fatal
    found = survey("rollouts", data, Renderer(tokenizer), DataConfig(), 4)
    assert found.num_used == 2 and len(found.refused) == 1


def test_a_survey_of_pairs_and_of_prompts(renderer):
    data = rows(
        {"prompt": "a", "chosen": "yes", "rejected": "no"},
        {"prompt": "a", "chosen": "same", "rejected": "same"},
        {"prompt": "a", "chosen": "x" * 50, "rejected": "no"},
        {"prompt": "a", "chosen": "yes", "rejected": "x" * 50},
    )
    found = survey("preferences", data, renderer, DataConfig(on_long="skip", on_empty="skip"), 0)
    assert (found.num_used, len(found.refused)) == (1, 3) and not any(refusal.fatal for refusal in found.refused)
    assert [(one.side, text(renderer, one)) for one in found.sequences] == [
        ("chosen", ".yes<|im_end|>"),
        ("rejected", ".no<|im_end|>"),
    ]
    prompts = rows({"prompt": "abc"}, {"prompt": "x" * 39})
    found = survey("rollouts", prompts, renderer, DataConfig(), 4)
    assert [list(one.tokens) for one in found.sequences] == [renderer.tokenizer.encode("abc")]
    assert found.sequences[0].num_trained == 0
    assert "a prompt of 39 tokens and a completion of up to 4 do not fit in 40" in found.refused[0].reason


def test_lengths():
    sequences = [WeightedSequence("", [0] * n, np.array([0.0] + [1.0] * (n - 1))) for n in range(2, 102)]
    assert lengths(sequences, lambda one: len(one.tokens)) == {
        "sequences": 100,
        "tokens": 5150,
        "shortest": 2,
        "50%": 52,
        "90%": 92,
        "99%": 101,
        "longest": 101,
    }
    assert lengths(sequences[:1], lambda one: one.num_trained)["longest"] == 1


def test_pieces_spell_the_text(renderer):
    spelled = "Grüße 東京 🎉\n a"
    tokens = renderer.tokenizer.encode(spelled)
    weights = np.ones(len(tokens))
    found = text_spans(renderer.tokenizer, tokens, weights)
    assert "".join(piece.text for piece in found) == spelled
    assert "東" in [piece.text for piece in found] and len(found) == len(spelled)  # four bytes of a party are one piece
    weights[-3:] = 0
    assert [piece.weight for piece in text_spans(renderer.tokenizer, tokens, weights)][-3:] == [0.0] * 3
    assert text_spans(renderer.tokenizer, [], np.zeros(0)) == []


def test_long_sequences_are_shown_at_both_ends(capsys):
    found = [TextSpan(f"{n} ", float(n > 998)) for n in range(1000)]
    check_data.show_tokens("title", found, "", color=False)
    out = capsys.readouterr().out
    assert (
        out.startswith("title\n0 1 2 ") and " 238 239  ... 640 tokens ... 880 881 " in out and out.endswith("998 [[999 ]]\n\n")
    )


def test_weights_between_are_told(capsys):
    shown = [TextSpan("a", 0.0), TextSpan("b", 1.0), TextSpan("c", 1.0), TextSpan("d", 0.5)]
    check_data.show_tokens("t", shown, "sampled", color=False)
    assert capsys.readouterr().out == "t\na[[bc]][[d]]x0.5[[sampled]]\n\n"


def test_in_color(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLORTERM", "")):
        monkeypatch.setenv(name, value)
    shown = [TextSpan("[b]prompt", 0.0), TextSpan("an", 1.0), TextSpan("\n", 1.0), TextSpan("half", 0.5)]
    check_data.show_tokens("t", shown, "", color=True)
    out = capsys.readouterr().out
    assert "\033[2m[b]prompt\033[0m\033[1;38;" in out and "\u23ce" in out


# The commands


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        pytest.param(
            "sft",
            ["learns from conversations", "[[", "<|im_end|>]]", "trained tokens", "of the tokens are trained"],
            marks=pytest.mark.slow,
        ),
        ("dpo", ["learns from preferences", "chosen, trained tokens", ":1, rejected: "]),
        ("grpo", ["learns from rollouts", "prompts", "[[sampled, up to 16 tokens]]"]),
    ],
)
def test_the_shipped_data(capsys, recipe, words):
    assert run(["check", "data", f"recipe={recipe}", "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert not [word for word in words if word not in out]
    assert "training: " in out and "held out: " in out and out.count("all can be used") == 2
    assert not list(Path.cwd().iterdir())


def test_refused_rows_are_listed_and_end_with_2(capsys):
    answers = [{"messages": [USER, ANSWER]}, {"messages": [USER]}, {"messages": "no"}, {"messages": [USER, {"role": "user"}]}]
    Path("mine.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    command = ["check", "data", "recipe=sft", "model=tiny", "data=jsonl", f"data.path={Path.cwd()}/mine.jsonl"]
    assert run([*command, "data.on_empty=skip"]) == 2
    got = capsys.readouterr()
    assert "training: 4 rows, 3 rows cannot be used" in got.out and "held out: no rows" in got.out
    assert '\n  left out: mine.jsonl:2: "messages" has no assistant turn' in got.out
    assert got.out.count("\n  stops the run: mine.jsonl:") == 2
    assert got.err.startswith("error: check data: a run would stop at 2 rows; the first: mine.jsonl:3: ")
    Path("mine.jsonl").write_text(json.dumps(answers[1]) + "\n")
    assert run([*command, "data.on_empty=skip"]) == 2
    assert capsys.readouterr().err.startswith("error: check data: no row is left to train on; the first: mine.jsonl:1: ")
    Path("mine.jsonl").write_text("{broken\n")
    assert run(command) == 2
    got = capsys.readouterr()
    assert "training: 1 row, 1 row cannot be used" in got.out
    assert got.err.startswith("error: check data: no row is left to train on; the first: mine.jsonl:1: broken JSON at column 2")


@pytest.mark.slow
def test_columns_that_train_nothing_are_named(capsys):
    more = {"id": 3, "score": None, "images": []}
    row = {"messages": [{**USER, "at": "noon"}, ANSWER], **more}
    picture = {"messages": [USER, ANSWER], "image": "a.png", "seen": True}
    Path("mine.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(picture) + "\n")
    command = ["check", "data", "recipe=sft", "data=jsonl", f"data.path={Path.cwd()}/mine.jsonl"]
    assert run([*command, "data.on_bad_row=skip"]) == 0
    out = capsys.readouterr().out
    assert "\n  columns not used for training: id, at of messages\n" in out
    assert '\n  left out: mine.jsonl:2: "image" holds media, and the text would be trained without; ' in out


def test_a_recipe_without_data_is_an_error(capsys):
    run(["fork", "sft", "mine"])
    code = Path("recipes/mine.py")
    code.write_text(code.read_text().replace("DATA = ", "OTHER = "))
    capsys.readouterr()
    assert run(["check", "data", "recipe=mine"]) == 2
    assert capsys.readouterr().err == "error: recipes/mine.py: no DATA, the kind of data it reads; add DATA = 'conversations'\n"


def facts(*overrides: str) -> dict[str, str]:
    cfg = OmegaConf.create(show(ComposeRequest(overrides), "job", resolve=True))
    return dict(plan(cfg, list(overrides)))


def test_a_plan_says_what_the_run_would_do():
    sizes = ["recipe.epochs=2", "recipe.batch_size=100", "data.limit=950", "schedule.warmup_steps=40"]
    found = facts("recipe=sft", *sizes, "checkpoint.keep=null", "checkpoint.every=50", "eval.limit=200")
    assert "recipes/sft.py, learns from conversations. SFT: " in found["recipe"]
    assert "data/tiny, fresh weights, float32; trains every parameter" in found["model"]
    assert found["data"].endswith("chat_train.jsonl, 950 rows; held out: 200 rows (eval.limit=200)")
    assert "CrossEntropy: returns a mean, divided by nothing; terms of one token each" in found["loss"]
    assert found["steps"] == "at most 20: 2 x 950 rows, 100 per step"
    assert "linear, after a warm-up of 40 steps; gradient clipped at norm 1" in found["optimizer"]
    assert found["checkpoints"] == "every 50 steps, and the last; all are kept"
    assert found["writes to"] == "runs/sft-<time>-<id>"
    assert not {"reward", "reference", "trackers, hooks"} & set(found)


@pytest.mark.slow
def test_a_plan_of_a_run_with_rollouts():
    found = facts(
        "recipe=grpo", "recipe.steps=7", "data.limit=50", "model.lora_rank=8", "tracker=tensorboard", "eval.every=null", "out=x"
    )
    assert found["steps"].startswith("7, of ") and found["reward"] == "Number(answer_only=True, column='answer')"
    assert found["rollout"] == "completions of up to 16 tokens at temperature 1"
    assert "one more forward pass per step" in found["reference"] and "a LoRA adapter of rank 8" in found["model"]
    assert found["evaluation"] == "before and after the run only" and found["writes to"] == "x"
    assert "TensorBoard" in found["trackers, hooks"]


def test_a_plan_names_the_optimizer_and_says_that_nothing_is_held_out(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 40)
    found = facts("recipe=sft", "model=tiny", f"data={rows}", "backend.optimizer=adafactor", "optim=adafactor")
    assert found["optimizer"].startswith("Adafactor, learning rate ")
    assert found["evaluation"].startswith("none, without held-out rows; ")


@pytest.mark.slow
def test_what_would_have_to_be_downloaded_is_not_counted():
    found = facts("recipe=sft", "data=hub", "data.name=some/where", "recipe.epochs=3", "recipe.batch_size=64")
    assert found["data"] == "some/where[train], of the hub, not read; held out: of the hub, not read"
    assert found["steps"] == "3 x the rows, 64 per step"


@pytest.mark.slow
def test_check_config_and_dry_run_refuse_the_same(capsys):
    for words, message in (
        (["recipe=sft", "loss=dpo"], "loss: recipe=sft trains on conversations, and DPO compares pairs"),
        (["optim.lr=fast"], "optim.lr: expected a number, got 'fast'"),
        (["lr=1"], "unknown key 'lr'; write optim.lr=1"),
    ):
        for command in (["check", "config"], ["train", "--dry-run"]):
            assert run([*command, *words]) == 2
            got = capsys.readouterr()
            assert got.err.startswith(f"error: {message}") and got.err.count("\n") == 1 and not got.out
    assert run(["check", "config", "recipe=orpo", "data.limit=50"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recipe ") and "\nwrites to    runs/orpo-<time>-<id>\n" in out
    Path("taken").mkdir()
    Path("taken/file").write_text("")
    assert run(["check", "config", "out=taken"]) == 2
    assert "out: taken exists and is not a run of cookbook" in capsys.readouterr().err


def test_check_alone_lists_its_commands(capsys):
    assert run(["check"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("loss", "data", "config"))
