"""The binary half of the wire: protobuf messages, built from the table below when this module is imported.

Only numbers and types are on the wire, so the messages live in a package of our own and get along with the client's in one
process. An enum travels as a whole number, and is one here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CONTENT_TYPE = "application/x-protobuf"

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # Tensor.dtype and BatchedTensor.dtype
STOPPED, CUT = 0, 1  # SampledSequence.stop_reason

# message: fields "number [optional|repeated|oneof] type name". Source: the messages of tinker 0.38.
MESSAGES = {
    "EncodedTextChunk": "1 bytes tokens",
    "ImageChunk": "1 bytes data; 2 string format",
    "DmelChunk": "1 bytes dmel",
    "Chunk": "1 oneof EncodedTextChunk encoded_text; 2 oneof ImageChunk image; 3 oneof DmelChunk dmel",
    "SparseCsr": "1 bytes values; 2 bytes crow_indices; 3 bytes col_indices",
    "Tensor": "1 oneof bytes dense; 2 oneof SparseCsr sparse_csr; 3 int32 dtype; 4 repeated int64 shape",
    "Datum": "1 repeated Chunk model_input; 2 map Tensor loss_fn_inputs",
    "LossConfigValue": "1 oneof double number; 2 oneof string text",
    "ForwardBackwardRequest": "1 string model_id; 2 int32 seq_id; 3 repeated Datum data; 4 string loss_fn; "
    "5 map double loss_fn_config; 6 bool forward_only; 7 map LossConfigValue loss_fn_config_v2",
    "BatchedTensor": "1 bytes data; 2 bytes offsets; 3 int32 dtype; 4 repeated int64 trailing_shape",
    "ArrayRecord": "1 string type_tag; 2 map BatchedTensor fields; 3 int64 num_datums",
    "ForwardBackwardOutput": "1 string loss_fn_output_type; 2 repeated ArrayRecord loss_fn_outputs; 3 map double metrics",
    "TopkLogprobs": "1 bytes token_ids; 2 bytes logprobs; 3 uint32 k; 4 uint32 length",
    "PromptAltTokens": "1 Tensor tokens; 2 Tensor logprobs",
    "SampledSequence": "1 int32 stop_reason; 2 bytes tokens; 3 optional bytes logprobs; "
    "4 optional TopkLogprobs topk_sampled_logprobs",
    "SampleResponse": "1 repeated SampledSequence sequences; 2 optional bytes prompt_logprobs; "
    "3 optional TopkLogprobs topk_prompt_logprobs; 4 int32 prompt_cache_hit_tokens; "
    "5 optional Tensor target_prompt_logprobs; 6 optional PromptAltTokens prompt_alt_tokens",
}

_PACKAGE = "cookbook_wire"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}") for name in ("bytes", "string", "double", "bool", "int32", "int64", "uint32")
}


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="cookbook/wire.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split("; "):
            number, *label, kind, field = text.split()
            _add(message, int(number), label[0] if label else "", kind, field)
    return file


def _add(message: Any, number: int, label: str, kind: str, name: str) -> None:
    repeated = label in ("repeated", "map")
    field = message.field.add(number=number, name=name, label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL)
    if label == "map":
        entry = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        _add(nested, 1, "", "string", "key")
        _add(nested, 2, "", kind, "value")
        kind = f"{message.name}.{entry}"
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if label in ("oneof", "optional"):
        field.oneof_index = _oneof(message, "choice" if label == "oneof" else f"_{name}")
        field.proto3_optional = label == "optional"


def _oneof(message: Any, name: str) -> int:
    """The index of the group ``name``. Protobuf makes an optional field a group of one."""
    names = [one.name for one in message.oneof_decl]
    if name not in names:
        message.oneof_decl.add(name=name)
        names.append(name)
    return names.index(name)


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _with_nested(descriptor: Any) -> Iterator[tuple[str, Any]]:
    yield descriptor.name, message_factory.GetMessageClass(descriptor)
    for one in descriptor.nested_types:
        yield from _with_nested(one)


# All of them are held here. protobuf makes the class of a part when it meets one, and the garbage collector may take it while
# no such part lives: a class a request. Once a process ended in protobuf 7.36 at a class without its descriptor; this is the
# likely cause.
_CLASSES = {name: made for known in MESSAGES for name, made in _with_nested(_pool.FindMessageTypeByName(f"{_PACKAGE}.{known}"))}

ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]
Tensor = _CLASSES["Tensor"]
