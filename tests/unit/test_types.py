"""The nouns: aligned when they are made, and made from whatever people have, Tinker's own included."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch

from cookbook.errors import ConfigError, DataError
from cookbook.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ModelInput,
    SamplingParams,
    TensorData,
    as_adam,
    as_datum,
    as_model_input,
    as_sampling,
    datum_from_tokens_weights,
)

THREE = ModelInput.from_ints([5, 6, 7])


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype", "shape"),
    [
        ([1, 2], "int64", [2]),
        ([0.5, 2], "float64", [2]),
        ([[1, 2], [3, 4]], "int64", [2, 2]),
        (range(3), "int64", [3]),
        (np.float32([1, 2]), "float32", [2]),
        (np.arange(4, dtype=np.int32), "int32", [4]),
        (torch.tensor([1.0, 2.0]), "float32", [2]),
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "float32", [2]),
        (torch.tensor([1.5], dtype=torch.float16), "float32", [1]),
        (torch.tensor([1, 2]), "int64", [2]),
        (torch.tensor([1.5], requires_grad=True), "float32", [1]),
        ([True, False], "bool", [2]),
        (3.5, "float64", []),
    ],
)
def test_arrays_come_from_anything_that_holds_numbers(given, dtype, shape):
    tensor = TensorData(given)
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    expected = given.detach().float() if isinstance(given, torch.Tensor) else given
    np.testing.assert_array_equal(tensor.array, np.asarray(expected))
    assert tensor.data == np.asarray(expected).ravel().tolist()
    assert torch.equal(tensor.to_torch(), torch.from_numpy(tensor.to_numpy()))
    assert tensor.tolist() == tensor.array.tolist()


def test_dtype_and_shape_may_be_said():
    tensor = TensorData(data=[1, 2, 3, 4], dtype="float32", shape=[2, 2])
    assert (tensor.dtype, tensor.shape, tensor.tolist()) == ("float32", [2, 2], [[1.0, 2.0], [3.0, 4.0]])
    assert len(tensor) == 2
    assert TensorData.from_numpy(tensor.array).dtype == TensorData.from_torch(tensor.to_torch()).dtype == "float32"
    assert TensorData(tensor).array is tensor.array


@pytest.mark.parametrize("given", [["a"], None, [[1], [1, 2]], [None, 1.0], object()])
def test_what_is_no_array_of_numbers_is_refused(given):
    with pytest.raises(DataError, match="not an array of numbers"):
        TensorData(given)
    with pytest.raises(DataError, match=r"^mine: not an array of numbers"):
        Datum(THREE, {"mine": given})


def test_a_read_only_array_becomes_a_tensor_of_its_own():
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = TensorData(array).to_torch()
    tensor[0] = 9
    assert array[0] == 0


def test_detached_numbers_do_not_change():
    array = np.arange(3.0)
    tensor = TensorData(array)
    detached = tensor.detached()
    view = array[:]
    view.flags.writeable = False  # read-only, and its owner is not
    others = [detached, TensorData(view).detached(), Datum(THREE, {"weights": array}).detached().loss_fn_inputs["weights"]]
    array[:] = 9
    assert all(other.tolist() == [0, 1, 2] for other in others) and tensor.tolist() == [9, 9, 9]
    array.flags.writeable = False
    assert tensor.detached() is tensor  # nothing to copy


# ---- datums ----------------------------------------------------------------------------------------------------------


def test_a_datum_takes_any_key_of_the_inputs_length():
    datum = Datum(THREE, {"target_tokens": [6, 7, 8], "mine": np.ones((3, 2)), "one_number": 0.5})
    assert datum.loss_fn_inputs["mine"].shape == [3, 2]
    assert datum.loss_fn_inputs["one_number"].shape == []
    assert Datum(THREE).loss_fn_inputs == {}


@pytest.mark.parametrize("length", [0, 2, 4])
def test_another_length_is_refused(length):
    message = f"weights has {length} values and model_input 3; build both from the same tokens"
    with pytest.raises(DataError, match=re.escape(message)):
        Datum(THREE, {"weights": [1.0] * length})
    with pytest.raises(DataError, match=re.escape(message)):
        Datum(THREE).with_inputs(weights=[1.0] * length)


def test_a_datum_does_not_change():
    datum = Datum(THREE, {"weights": [1, 2, 3]})
    with pytest.raises(AttributeError):
        datum.model_input = ModelInput.empty()
    with pytest.raises(TypeError):
        datum.loss_fn_inputs["weights"] = TensorData([1, 2, 3])
    more = datum.with_inputs(weights=[4, 5, 6], advantages=[0, 0, 1])
    assert datum.loss_fn_inputs["weights"].tolist() == [1, 2, 3]
    assert more.loss_fn_inputs["weights"].tolist() == [4, 5, 6]
    assert set(more.loss_fn_inputs) == {"weights", "advantages"}


def test_a_datum_survives_pickling():
    datum = Datum(THREE, {"weights": [1.0, 0.0, 0.5]})
    again = pickle.loads(pickle.dumps(datum))
    assert again.model_input == THREE
    assert again.loss_fn_inputs["weights"].tolist() == [1.0, 0.0, 0.5]


def test_model_inputs():
    assert ModelInput.from_ints(np.array([1, 2])) == ModelInput.from_ints(iter([1, 2])) == ModelInput((1, 2))
    assert THREE.to_ints() == [5, 6, 7]
    assert THREE.length == 3
    assert THREE.chunks[0].tokens == (5, 6, 7)
    assert ModelInput.empty().length == 0
    assert all(type(token) is int for token in ModelInput.from_ints(np.array([1, 2])).tokens)


@pytest.mark.parametrize("wrong", ["12", [1.5], np.array([1.0]), [None], None, 5])
def test_what_is_no_token_is_refused(wrong):
    with pytest.raises(DataError, match="model_input: expected token ids: "):
        as_model_input(wrong)


def test_an_input_of_chunks():
    chunks = [EncodedTextChunk(tokens=[1, 2]), EncodedTextChunk((3,))]
    made = ModelInput(chunks=chunks)
    assert made == ModelInput.from_ints([1, 2, 3]) == ModelInput.empty().append(chunks[0]).append_int(3)
    assert hash(made) == hash(ModelInput((1, 2, 3))) and chunks[0].length == 2
    with pytest.raises(DataError, match=r"holds something other than text.*got object"):
        ModelInput(chunks=[object()])
    with pytest.raises(DataError, match="expected token ids"):
        EncodedTextChunk(tokens=[1.5])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_tokens_and_weights_are_shifted_together(kind):
    datum = datum_from_tokens_weights(kind([10, 11, 12, 13]), kind([9.0, 0.0, 0.5, 1.0]))
    assert datum.model_input.to_ints() == [10, 11, 12]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [11, 12, 13]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 0.5, 1.0]  # the first token's weight is never used
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["weights"].dtype == "float32"


@pytest.mark.parametrize(("max_length", "kept"), [(None, 5), (9, 5), (5, 5), (4, 4), (2, 2)])
def test_a_long_sequence_is_cut_at_its_end(max_length, kept):
    datum = datum_from_tokens_weights([1, 2, 3, 4, 5], [0, 0.1, 0.2, 0.3, 0.4], max_length)
    assert datum.model_input.to_ints() == [1, 2, 3, 4][: kept - 1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5][: kept - 1]
    np.testing.assert_allclose(datum.loss_fn_inputs["weights"].array, [0.1, 0.2, 0.3, 0.4][: kept - 1])


@pytest.mark.parametrize(
    ("tokens", "weights", "max_length", "message"),
    [
        ([1, 2, 3], [1, 1], None, "weights has 2 values and tokens 3"),
        ([1], [1], None, "at least 2 tokens to predict one, got 1"),
        ([1, 2, 3], [1, 1, 1], 1, "at least 2 tokens to predict one, got 1"),
        ([], [], None, "at least 2 tokens to predict one, got 0"),
    ],
)
def test_tokens_and_weights_that_make_no_datum(tokens, weights, max_length, message):
    with pytest.raises(DataError, match=message):
        datum_from_tokens_weights(tokens, weights, max_length)


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_field():
    assert AdamParams() == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
    assert SamplingParams() == SamplingParams(None, None, None, 1.0, -1, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1e-4},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": -1.0},
        {"weight_decay": float("inf")},
        {"grad_clip_norm": -1.0},
    ],
)
def test_optimizer_numbers_out_of_range(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ConfigError, match=f"optim: {name} must be .*, got {value}"):
        AdamParams(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_sampling_numbers_out_of_range(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ConfigError, match=f"sampling: {name} must be .*, got {value}"):
        SamplingParams(**wrong)


# ---- Tinker's objects ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tinker():
    return pytest.importorskip("tinker")


def test_a_tinker_datum_is_a_datum(tinker):
    theirs = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 0.5, 1.0], "mine": np.float32([1, 2, 3])},
    )
    converted = as_datum(theirs, 0)
    assert converted.model_input == ModelInput.from_ints([1, 2, 3])
    assert {key: value.tolist() for key, value in converted.loss_fn_inputs.items()} == {
        "target_tokens": [2, 3, 4],
        "weights": [0.0, 0.5, 1.0],
        "mine": [1.0, 2.0, 3.0],
    }
    assert converted.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert as_datum(converted, 0) is converted


def test_a_tinker_input_of_several_chunks_is_one_sequence(tinker):
    chunks = [tinker.types.EncodedTextChunk(tokens=[1, 2]), tinker.types.EncodedTextChunk(tokens=[3])]
    assert as_model_input(tinker.ModelInput(chunks=chunks)) == ModelInput.from_ints([1, 2, 3])
    assert as_model_input([1, 2]) == as_model_input(ModelInput.from_ints([1, 2])) == ModelInput.from_ints([1, 2])


def test_sparse_tinker_tensors_become_dense(tinker):
    targets = torch.zeros(6, 8, dtype=torch.int64)
    targets[4, :2] = torch.tensor([7, 9])
    targets[5, :3] = torch.tensor([3, 0, 5])  # a dropped target 0 densifies to 0: nothing is lost
    weights = torch.zeros(6, 8)
    weights[4, :2] = torch.tensor([0.25, 0.75])
    theirs = tinker.Datum(tinker.ModelInput.from_ints([1] * 6), {"target_tokens": targets, "weights": weights})
    assert theirs.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    converted = as_datum(theirs, 0)
    np.testing.assert_array_equal(converted.loss_fn_inputs["target_tokens"].array, targets.numpy())
    np.testing.assert_array_equal(converted.loss_fn_inputs["weights"].array, weights.numpy())


def test_a_bad_tinker_datum_is_named(tinker):
    theirs = tinker.Datum(tinker.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3]})
    with pytest.raises(DataError, match="datum 7: target_tokens has 2 values and model_input 3"):
        as_datum(theirs, 7)


def test_a_datum_with_an_image_is_refused(tinker):
    image = tinker.types.ImageChunk(data=b"", format="png")
    theirs = tinker.Datum(tinker.ModelInput(chunks=[image]), {"target_tokens": [2, 3]})
    with pytest.raises(DataError, match="datum 7: model_input: holds something other than text"):
        as_datum(theirs, 7)


@pytest.mark.parametrize("wrong", [{"model_input": [1]}, "text", 3])
def test_what_is_no_datum_is_named(wrong):
    with pytest.raises(DataError, match=f"datum 2: expected a Datum, got {type(wrong).__name__}"):
        as_datum(wrong, 2)


def test_tinker_parameters(tinker):
    adam = tinker.AdamParams(learning_rate=3e-4, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    assert as_adam(adam) == AdamParams(3e-4, 0.8, 0.99, 1e-8, 0.1, 1.0)
    assert as_adam(AdamParams()) == AdamParams() == as_adam(tinker.AdamParams())
    params = tinker.SamplingParams(max_tokens=5, seed=3, stop=["a"], temperature=0.5, top_k=7, top_p=0.9)
    assert as_sampling(params) == SamplingParams(5, 3, ["a"], 0.5, 7, 0.9)
    assert as_sampling(tinker.SamplingParams()) == SamplingParams() == as_sampling(SamplingParams())
