"""PEFT adapters made elsewhere: uploaded ones compute what PEFT computes, training continues, bad ones are refused."""

from __future__ import annotations

import json

import httpx
import pytest
import servertools
import torch
from safetensors.torch import load_file, save
from waiting import WAIT_S

from cookbook.cli import weights
from cookbook.errors import CheckpointError

tinker = pytest.importorskip("tinker")
TOKENS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def adapter(tiny_folder, tmp_path_factory):
    """Folder of an adapter on some of the layers, with an alpha that is not the rank, and PEFT's log-probabilities."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    modules = ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"]
    network = get_peft_model(
        base, LoraConfig(r=3, lora_alpha=12, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
        folder = tmp_path_factory.mktemp("adapter")
        network.save_pretrained(folder)
        logprobs = network.eval()(torch.tensor([TOKENS])).logits.log_softmax(-1)[0]
        unchanged = network.unload()(torch.tensor([TOKENS])).logits.log_softmax(-1)[0]
    pick = torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])
    assert (logprobs[pick] - unchanged[pick]).abs().max() > 1e-2
    return folder, logprobs[pick].tolist()


def test_an_adapter_of_peft_computes_the_same_and_is_trained_on(server, service, adapter, capsys, monkeypatch):
    folder, logprobs = adapter
    monkeypatch.setenv("TINKER_API_KEY", servertools.KEY)
    weights.upload(folder, server.url, "mine")
    path = capsys.readouterr().out.strip()
    assert path.startswith("tinker://") and path.endswith("/weights/mine")
    training = service.create_training_client_from_state(path).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    output = training.forward([datum], "cross_entropy").result()
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(logprobs, abs=1e-5)
    before = -sum(logprobs)
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    output = training.forward_backward([datum], "cross_entropy").result()
    assert output.metrics["loss:sum"] < before - 0.1
    saved = training.save_state("continued").result().path
    assert service.create_training_client_from_state(saved).result().get_info().lora_rank == 3
    assert service.create_rest_client().get_weights_info_by_tinker_path(path).result().lora_rank == 3


def _body(config, data):
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 10**9}, "r must be an integer"),
        ({"r": True}, "r must be an integer"),
        ({"r": 4}, "must have shape"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be"),
        ({"lora_alpha": "12"}, "lora_alpha must be"),
        ({"lora_dropout": 1}, "lora_dropout must be"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"(a+)+$": 3}}, "rank_pattern"),
        ({"unknown": {"_target_": "subprocess.Popen"}}, "unknown"),
        ({"init_lora_weights": "pissa"}, "changes the weights of the base model"),
        ({"init_lora_weights": ["pissa"]}, "changes the weights of the base model"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(server, adapter, changes, message):
    config = json.loads((adapter[0] / "adapter_config.json").read_text()) | changes
    _refused(server, _body(config, (adapter[0] / "adapter_model.safetensors").read_bytes()), message)


def test_bad_tensors_are_refused_in_one_line(server, adapter):
    config = json.loads((adapter[0] / "adapter_config.json").read_text())
    data = (adapter[0] / "adapter_model.safetensors").read_bytes()
    tensors = load_file(adapter[0] / "adapter_model.safetensors")
    first = min(tensors)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 4]}}).encode()
    for body, message in [
        (b"", "is not a JSON object"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "at most 65,536"),
        (_body(b"[" * 60_000, data), "is not a JSON object"),
        (_body(config, b""), "not in the safetensors format"),
        (_body(config, b"\x80\x02}q\x00."), "not in the safetensors format"),
        (_body(config, (1 << 62).to_bytes(8, "little") + data[8:]), "not in the safetensors format"),
        (_body(config, data[:-4]), "damaged"),
        (_body(config, len(header).to_bytes(8, "little") + header + b"abcd"), "damaged"),
        (_body(config, save({})), "has no tensors"),
        (_body(config, save({**tensors, first: tensors[first] * float("nan")})), "not finite"),
        (_body(config, save({**tensors, first: tensors[first].to(torch.int32)})), "must be float32"),
        (_body(config, save({**tensors, first: tensors[first][:, :-1].contiguous()})), "must have shape"),
        (_body(config, save({**tensors, "../../x": tensors[first].clone()})), "is no adapter of a layer"),
        (
            _body(config, save({**tensors, "base_model.model.lm_head.lora_A.weight": torch.ones(3, 8)})),
            "is no adapter of a layer",
        ),
        (_body(config, save({first: tensors[first]})), "only one of"),
    ]:
        _refused(server, body, message)


def _refused(server, body, message):
    runs = list(server.service.catalog.folder.iterdir())
    response = httpx.post(
        f"{server.url}/api/v1/cookbook/upload_adapter",
        content=body,
        headers={"X-API-Key": servertools.KEY, "Content-Type": "application/octet-stream"},
        timeout=WAIT_S,
    )
    detail = response.json()["detail"]
    assert response.status_code == 400 and message in detail and "\n" not in detail and len(detail) < 500, detail
    assert list(server.service.catalog.folder.iterdir()) == runs


def test_what_is_not_an_adapter_is_not_sent(server, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: cannot be read"):
        weights.upload(tmp_path, server.url, "x")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="refused the adapter: "):
        weights.upload(tmp_path, server.url, "../x")
