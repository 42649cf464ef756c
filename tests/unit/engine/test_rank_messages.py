"""Messages between ranks make objects of listed classes only, and carry everything that ranks exchange."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from cookbook.engine.engine import Engine
from cookbook.engine.ranks import messages
from cookbook.engine.ranks.processes import Agreement, portable
from cookbook.errors import BackendError, DataError
from cookbook.losses.base import loss_class
from cookbook.types import AdamParams, Datum, ForwardBackwardOutput, ModelInput, TensorData


class Attack:
    """Calls a function when it is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class OwnError(Exception):
    """An error that the other ranks cannot import."""


ATTACKS = {
    "a command of the shell": Attack(os.system, "true"),
    "code": Attack(eval, "1"),
    "an attribute": Attack(getattr, 1, "real"),
    "a file": Attack(open, os.devnull),
    "a tensor of a file": Attack(torch.load, os.devnull),
    "a function of cookbook that ranks do not call": Attack(messages.packed, 1),
    "a model of a folder": Attack(AutoModelForCausalLM.from_pretrained, "folder"),
    "an array of a file": Attack(np.memmap, os.devnull),
    "a program of the tests": Attack,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_message_makes_no_object_of_another_class(name):
    with pytest.raises(BackendError, match="which ranks do not exchange"):
        messages.unpacked(pickle.dumps(ATTACKS[name]))


@pytest.mark.parametrize(
    ("module", "name"),
    [("cookbook.jobs.slurm", "subprocess.Popen"), ("cookbook.engine.ranks.messages", "pathlib.Path"), ("tokenizers", "Enum")],
)
def test_a_class_that_a_listed_module_imports_is_not_made(module, name):
    """pickle accepts any attribute of a module, and attributes of attributes."""
    message = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(BackendError, match="which ranks do not exchange"):
        messages.unpacked(message)


def test_a_module_is_not_imported_for_a_message(tmp_path, monkeypatch):
    (tmp_path / "only_for_this_test.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=r"only_for_this_test\.name"):
        messages.unpacked(b"\x80\x04conly_for_this_test\nname\n.")


def test_messages_carry_what_ranks_exchange():
    datum = Datum(ModelInput.from_ints([1, 2]), {"weights": TensorData(np.ones(2, np.float32))})
    output = ForwardBackwardOutput([{"logprobs": TensorData(np.zeros(2))}], {"loss": 1.0})
    command = (
        Engine.forward_backward,
        (7, [datum], loss_class("grpo")()),
        {"dtype": torch.bfloat16, "at": torch.device("cpu")},
    )
    values = [
        None,
        command,
        output,
        AdamParams(),
        Agreement(True, DataError("x")),
        OrderedDict(a={1, 2}),
        Path("a"),
        np.int64(3),
    ]
    found = messages.unpacked(messages.packed(values))
    assert found[1][0] is Engine.forward_backward and found[1][2] == command[2]
    assert found[2].metrics == output.metrics and np.array_equal(found[1][1][1][0].loss_fn_inputs["weights"].array, np.ones(2))
    assert found[3] == AdamParams() and str(found[4].error) == "x" and found[5:] == values[5:]
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert torch.equal(messages.unpacked(messages.packed(tensor)), tensor)
    tokenizer = messages.unpacked(messages.packed(tiny.tokenizer()))
    assert tokenizer.get_vocab() == tiny.tokenizer().get_vocab() and tokenizer.chat_template == tiny.tokenizer().chat_template
    with_gradient = messages.unpacked(messages.packed(torch.nn.Parameter(tensor)))
    assert torch.equal(with_gradient, tensor) and with_gradient.requires_grad


def test_errors_of_other_classes_become_a_backend_error():
    assert type(portable(DataError("x"))) is DataError and type(portable(ValueError("x"))) is ValueError
    assert str(portable(OwnError("x"))) == "OwnError: x" and type(portable(OwnError("x"))) is BackendError


def test_broadcast_and_gather_return_the_messages_of_all_ranks():
    """The collective operations of three ranks, in order."""
    sent = []
    assert messages.broadcast({"a": 1}, True, lambda tensor: sent.append(tensor.clone())) == {"a": 1}
    waiting = iter(sent)
    assert messages.broadcast(None, False, lambda tensor: tensor.copy_(next(waiting))) == {"a": 1}
    values = ["short", list(range(100)), None]
    packed = [torch.tensor(list(messages.packed(one)), dtype=torch.uint8) for one in values]

    def all_gather(found, own):
        for row, data in zip(found, packed, strict=True):
            if row.dtype == torch.int64:
                row.fill_(len(data))
            else:
                row[: len(data)] = data

    assert messages.gather(values[0], 3, all_gather) == values
