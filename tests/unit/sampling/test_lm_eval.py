"""``cookbook eval --tasks`` beside lm-eval's own model of transformers, on the same weights and tasks."""

import json
from pathlib import Path

import pytest
from evaltools import need_lm_eval
from runtools import SMALL, here, train, write  # noqa: F401 - here is a fixture

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.cli.app import run
from cookbook.data import Renderer
from cookbook.engine.model import ModelConfig
from cookbook.utils.paths import packaged

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.nightly]
TINY = packaged("data") / "tiny"
# Both compute in float32, and batch the texts differently.
TOLERANCE = 1e-4
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
TASKS = {
    "sums": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "answers": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "="], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "last": """\
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
target_delimiter: ""
metric_list: [{metric: perplexity}, {metric: acc}]
""",
}


@pytest.fixture
def folder(here):  # noqa: F811
    sums = [(a, b) for a in range(2, 6) for b in range(5)]
    rows = [{"question": f"{a}+{b}=", "choices": [str(a + b), str(a + b + 1)]} for a, b in sums]
    write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    Path("tasks").mkdir()
    for name, task in TASKS.items():
        Path(f"tasks/{name}.yaml").write_text(f"task: {name}\n{COMMON}{task}")
    return "tasks"


@pytest.mark.parametrize("chat", [False, True])
def test_every_kind_of_request_agrees_with_transformers(folder, chat, monkeypatch):
    lm_eval = need_lm_eval()
    from lm_eval.models.huggingface import HFLM

    from cookbook.sampling import lm_eval_tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = lm_eval_tasks.Tasks(tuple(TASKS), folder, chat=chat)
    trainer = LocalTrainer(ModelConfig(str(TINY)), LocalConfig(), seed=0)
    ours = lm_eval_tasks.SamplerModel(trainer.live_sampler(0).result(), Renderer(trainer.tokenizer, trainer.max_length), 0)
    theirs = HFLM(pretrained=str(TINY), device="cpu", dtype="float32", batch_size=4)
    results = [
        lm_eval.simple_evaluate(
            model=model, tasks=list(TASKS), task_manager=tasks.manager, bootstrap_iters=0, apply_chat_template=chat
        )
        for model in (ours, theirs)
    ]
    trainer.close()
    compared = 0
    for name in TASKS:
        mine, other = ([sample["filtered_resps"] for sample in result["samples"][name]] for result in results)
        for one, two in zip(_flat(mine), _flat(other), strict=True):
            assert one == two if isinstance(one, (str, bool)) else one == pytest.approx(two, abs=TOLERANCE)
            compared += 1
        # A value differs only as its log-likelihoods do.
        for key, value in results[1]["results"][name].items():
            if isinstance(value, float):
                assert results[0]["results"][name][key] == pytest.approx(value, rel=TOLERANCE)
    assert compared == 20 * (2 * 2 + 1 + 1 + 2)


def _flat(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def test_results_are_in_the_run_and_compared(folder, capsys, monkeypatch):
    need_lm_eval()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for out, rate in (("a", "1e-4"), ("b", "1e-2")):
        assert train(*SMALL["sft"], f"optim.lr={rate}", f"out={out}") == 0
        assert run(["eval", out, "eval.limit=10", "--tasks", "sums,answ*", "--task-folder", folder]) == 0
    shown = capsys.readouterr().out
    assert "on 20 rows from sums, answ*, judged by lm-eval\n" in shown and "sums/acc " in shown
    [file] = Path("a/evals").iterdir()
    result = json.loads(file.read_text())
    assert result["versions"].keys() == {"sums", "answers"} and result["limit"] == 10
    assert run(["compare", "a", "b"]) == 0
    compared = capsys.readouterr().out
    assert "cookbook eval: 20 rows from sums, answ*, judged by lm-eval\n" in compared and "answers/exact_match " in compared


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "nothing"], "error: --tasks: lm-eval has no task 'nothing'; `lm-eval ls tasks` lists them"),
        (["--tasks", "sums", "--task-folder", "none"], "error: --task-folder: 'none' is not a folder"),
        (["--tasks", "broken", "--task-folder", "tasks"], "error: --tasks: lm-eval: "),
    ],
)
def test_misuse_is_one_line(words, message, folder, capsys, monkeypatch):
    need_lm_eval()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("tasks/broken.yaml").write_text(f"task: broken\n{COMMON}{TASKS['last']}".replace("rows.jsonl", "missing.jsonl"))
    assert run(["eval", "tiny", *words]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(message) and "Traceback" not in err
