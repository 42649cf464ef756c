"""Evaluate the shipped model with ``lm-eval`` over the endpoint, and compare every score with the embedded engine.

``lm-eval`` needs 69 packages, so it belongs in an environment of its own::

    python -m venv /tmp/lm-eval && /tmp/lm-eval/bin/pip install 'lm-eval[api]' transformers
    python tools/lm_eval_endpoint.py /tmp/lm-eval/bin/lm_eval
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import servertools

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.data import Renderer
from cookbook.engine.model import ModelConfig, load_tokenizer
from cookbook.utils.paths import packaged

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
# The endpoint scores several texts in one batch, and the embedded engine one text at a time; float32.
TOLERANCE = 1e-4


def main(command: str) -> None:
    model = packaged("data") / "tiny"
    rows = [
        {"question": f"{a}+{b}=", "choices": [str(a + b), str(a + b + 1)], "answer": 0} for a in range(2, 6) for b in range(5)
    ]
    trainer = LocalTrainer(ModelConfig(str(model)), LocalConfig(), seed=0)
    renderer, sampler = Renderer(load_tokenizer(ModelConfig(str(model)))), trainer.live_sampler(0).result()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "sums.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"))
        with servertools.running(model, folder / "out", names=["tiny"]) as server:
            url = f"base_url={server.url}/v1/completions,num_concurrent=1"
            arguments = f"model=tiny,{url},tokenizer={model},tokenizer_backend=huggingface,max_length=4096"
            words = ["run", "--model", "local-completions", "--model_args", arguments, "--batch_size", "4"]
            words += [
                "--tasks",
                "sums",
                "--include_path",
                str(folder),
                "--output_path",
                str(folder / "results"),
                "--log_samples",
            ]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
            subprocess.run([command, *words], check=True, env=environment)
        [samples] = (folder / "results").rglob("samples_sums_*.jsonl")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
    differences = []
    for sample in found:
        question = renderer.prompt_tokens(sample["doc"]["question"])
        for choice, response in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            tokens = question + renderer.encode(choice)
            scores = sampler.compute_logprobs(tokens).result()[len(question) :]
            best = sampler.engine().passes.top_logprobs(tokens, 1)[0][len(question) - 1 :, 0].tolist()
            assert str(best == tokens[len(question) :]) == str(response[1]), (sample["doc"], choice, response)
            differences.append(abs(sum(scores) - float(response[0])))
    trainer.close()
    assert len(differences) == 2 * len(rows) and max(differences) < TOLERANCE, max(differences)
    print(f"{len(differences)} log-likelihoods differ by at most {max(differences):.1g} from the embedded engine")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "lm_eval")
