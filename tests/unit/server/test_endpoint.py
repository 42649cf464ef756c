"""The endpoint for agents: OpenAI's routes and vLLM's generate, by plain HTTP and by the unmodified ``openai`` client."""

from __future__ import annotations

import json
import re
import shlex
import threading
from http.client import HTTPConnection

import httpx
import numpy as np
import pytest
import servertools
import tiny
from places import ROOT
from servertools import wait_until
from tokentools import CHATML
from waiting import WAIT_S

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.data import Renderer
from cookbook.data.render import completed_text
from cookbook.engine.decoding.requests import TokenChunk
from cookbook.engine.model import ModelConfig
from cookbook.server.serve import drain
from cookbook.server.wire import openai, openai_results
from cookbook.server.wire.bodies import Refused
from cookbook.types import Sample, SamplingParams

MESSAGES = [{"role": "system", "content": "Count."}, {"role": "user", "content": "3+4="}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 5}
TEXT = {"model": "tiny", "prompt": "3+4=", "max_tokens": 6, "seed": 5}
IDS = {"token_ids": [5, 6, 7]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CHATS, TEXTS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("server"), names=["tiny"]) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def post(http):
    """``post(path, body)`` returns the status and the JSON of the response."""

    def send(path, body):
        response = http.post(path, content=json.dumps(body))
        return response.status_code, response.json()

    return send


@pytest.fixture(scope="module")
def embedded(tiny_folder):
    """A sampler on the same weights, in this process."""
    trainer = LocalTrainer(ModelConfig(str(tiny_folder)), LocalConfig(), seed=0)
    yield trainer.live_sampler(0).result()
    trainer.close()


@pytest.fixture(scope="module")
def renderer():
    return Renderer(tiny.tokenizer())


def events(http, path, body):
    """The chunks of a stream."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}, {"top_k": 3, "min_p": 0.1}])
def test_a_chat_has_the_tokens_and_logprobs_of_the_embedded_engine(post, embedded, renderer, options):
    status, found = post(CHATS, {**CHAT, **options, "n": 3, "logprobs": True})
    prompt = renderer.prompt_tokens(MESSAGES)
    expected = embedded.sample(prompt, 3, SamplingParams(max_tokens=40, seed=5, **options)).result().sequences
    assert status == 200 and found["object"] == "chat.completion" and found["model"] == "tiny"
    for choice, sample in zip(found["choices"], expected, strict=True):
        assert choice["message"] == {"role": "assistant", "content": renderer.text(sample.tokens), "refusal": None}
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == sample.logprobs
        assert choice["finish_reason"] == sample.stop_reason
    completed = sum(len(sample.tokens) for sample in expected)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": completed, "total_tokens": len(prompt) + completed}
    assert found["usage"] == usage


def test_generate_has_ids_masks_and_logprobs_of_the_embedded_engine(post, embedded):
    params = {"max_tokens": 8, "seed": 3, "n": 2, "logprobs": 0, "prompt_logprobs": 0, "stop_token_ids": [9]}
    status, found = post(GENERATE, {**IDS, "request_id": "mine", "sampling_params": params})
    expected = embedded.sample([5, 6, 7], 2, SamplingParams(max_tokens=8, seed=3, stop=[9]), include_prompt_logprobs=True)
    assert status == 200 and found["request_id"] == "mine" and found["model"] == "tiny"
    for choice, sample in zip(found["choices"], expected.result().sequences, strict=True):
        assert choice["token_ids"] == sample.tokens
        assert choice["sampled_mask"] == [0, 0, 0] + [1] * len(sample.tokens)
        assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in sample.tokens]
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == sample.logprobs
    pairs = zip([5, 6, 7], found["prompt_logprobs"], strict=True)
    scores = [None if row is None else row[str(token)]["logprob"] for token, row in pairs]
    assert scores == expected.result().prompt_logprobs and found["prompt_token_ids"] == [5, 6, 7]


def test_generate_without_a_stop_fills_its_tokens(post):
    for options, reason in (({"ignore_eos": True}, "length"), ({"stop_token_ids": list(range(259))}, "stop")):
        found = post(GENERATE, {**IDS, "sampling_params": {"max_tokens": 30, "seed": 1, **options}})[1]["choices"][0]
        assert (found["finish_reason"], len(found["token_ids"])) == (reason, 30 if reason == "length" else 1)
        assert found["logprobs"] is None


def test_echo_scores_prompts_as_lm_eval_reads_them(post, embedded, renderer):
    """Texts and tokens; the value of a token equals the largest of its position exactly if it is the most likely one."""
    prompts = ["2+2=4", "hello"]
    tokens = [renderer.prompt_tokens(prompt) for prompt in prompts]
    body = {"model": "tiny", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    by_text, by_ids = (post(TEXTS, {**body, "prompt": given})[1]["choices"] for given in (prompts, tokens))
    assert by_text == by_ids
    # One batch, as the prompts of one request.
    params = SamplingParams(max_tokens=1, temperature=0.0)
    expected = [embedded.sample(one, 1, params, include_prompt_logprobs=True) for one in tokens]
    for index, (choice, ids, future) in enumerate(zip(by_text, tokens, expected, strict=True)):
        [sample], found = future.result().sequences, choice["logprobs"]
        values, whole = found["token_logprobs"], [*ids, *sample.tokens]
        assert values == [*future.result().prompt_logprobs, *sample.logprobs]
        best = embedded.engine().passes.top_logprobs(whole, 1)[0][:, 0].tolist()
        likely = [value == max(top.values()) for value, top in zip(values[1:], found["top_logprobs"][1:], strict=True)]
        assert likely == [one == token for one, token in zip(best, whole[1:], strict=True)] and any(likely)
        assert choice["index"] == index and choice["text"].startswith(prompts[index])
        assert found["text_offset"][: len(ids)] == list(range(len(ids)))


def test_a_prompt_is_scored_alone_or_returned_alone(post, embedded, renderer):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 0, "echo": True}
    status, found = post(TEXTS, {**body, "logprobs": 0})
    assert status == 200 and found["choices"][0]["text"] == "abc"
    assert (
        found["choices"][0]["logprobs"]["token_logprobs"] == embedded.compute_logprobs(renderer.prompt_tokens("abc")).result()
    )
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert post(TEXTS, body)[1]["choices"][0] == {"index": 0, "text": "abc", "finish_reason": "length", "logprobs": None}


def test_top_logprobs_are_those_of_the_temperature(post, embedded, renderer):
    """5e-6: the sampler decodes with a cache, the most likely tokens come from a pass over the whole text; float32."""
    found = post(CHATS, {**CHAT, "temperature": 0.5, "max_tokens": 5, "logprobs": True, "top_logprobs": 20})[1]
    for one in found["choices"][0]["logprobs"]["content"]:
        top = {entry["token"]: entry["logprob"] for entry in one["top_logprobs"]}
        assert top[one["token"]] == one["logprob"] and len(top) in (20, 21)
    prompt = renderer.prompt_tokens(MESSAGES)
    first = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"]
    cold, warm = (embedded.engine().passes.top_logprobs([*prompt, 5], 259, t)[1][-1] for t in (0.5, 1.0))
    assert first == pytest.approx(cold[0], abs=5e-6)
    normal = warm.astype("float64") / 0.5
    assert cold == pytest.approx(normal - np.log(np.exp(normal).sum()), abs=5e-6)


def test_requests_without_a_seed_differ(post):
    unseeded = {key: value for key, value in CHAT.items() if key != "seed"}
    first, second = (post(CHATS, unseeded)[1]["choices"][0]["message"]["content"] for _ in range(2))
    assert first != second


def test_a_stop_string_is_cut_off(http, post):
    whole = post(TEXTS, {**TEXT, "max_tokens": 30})[1]["choices"][0]["text"]
    stop = whole[8:10]
    found = post(TEXTS, {**TEXT, "max_tokens": 30, "stop": [stop, "never"]})[1]["choices"][0]
    assert found == {"index": 0, "text": whole[: whole.index(stop)], "finish_reason": "stop", "logprobs": None}
    chunks = events(http, TEXTS, {**TEXT, "max_tokens": 30, "stop": [stop, "never"]})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == found["text"]


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_streamed_chat_is_the_whole_one(http, post):
    body = {**CHAT, "n": 2, "logprobs": True, "stop": ["zz"]}
    whole = post(CHATS, body)[1]
    *chunks, last = events(http, CHATS, {**body, "stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        # A round of decoding is 16 tokens.
        assert len(parts) > 2 or len(choice["logprobs"]["content"]) <= 16
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        scores = [one for part in parts[1:] for one in part["logprobs"]["content"]]
        assert scores == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]


def test_a_streamed_completion_is_the_whole_one(http, post):
    body = {**TEXT, "prompt": ["3+4=", "5+5="], "max_tokens": 40, "n": 2, "logprobs": 0}
    whole = post(TEXTS, body)[1]["choices"]
    chunks = [chunk["choices"][0] for chunk in events(http, TEXTS, body)]
    for choice in whole:
        parts = [one for one in chunks if one["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key in ("tokens", "token_logprobs"):
            assert [one for part in parts for one in part["logprobs"][key]] == choice["logprobs"][key]


@pytest.mark.parametrize("stops", [(), ("c</s",)])
def test_a_part_of_a_character_or_of_a_stop_string_is_kept_back(renderer, stops):
    text = openai_results.TextStream(renderer, stops)
    parts = [text.add([token], is_last=False) for token in renderer.encode("aé🙂bc<")]
    held = ["a", "", "é", "", "", "", "🙂", "b"]
    assert parts == held + (["", ""] if stops else ["c", "<"])
    assert text.add(renderer.encode("/s"), is_last=True) == ("" if stops else "/s")


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_and_its_checkpoints_are_models(server, post):
    tinker = pytest.importorskip("tinker")
    body = {"sampling_params": {"max_tokens": 6, "seed": 3, "logprobs": 0, "temperature": 0.0}, **IDS}

    def drawn(model):
        status, found = post(GENERATE, {**body, "model": model})
        assert status == 200, found
        return [(one["token_id"], one["logprob"]) for one in found["choices"][0]["logprobs"]["content"]]

    def expected(client):
        params = tinker.SamplingParams(max_tokens=6, seed=3, temperature=0.0)
        [sample] = client.sample(tinker.ModelInput.from_ints([5, 6, 7]), 1, params).result().sequences
        return list(zip(sample.tokens, [float(one) for one in sample.logprobs], strict=True))

    with tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY) as service:
        training = service.create_lora_training_client("tiny", rank=4).result()
        run = f"runs/{training.model_id}"
        status, refused = post(GENERATE, {**body, "model": run})
        assert status == 404 and "no weights to sample from" in refused["error"]["message"]
        inputs = {"target_tokens": [6, 7, 8], "weights": [1.0] * 3}
        rows = [tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)]
        versions = [drawn("tiny")]
        for save in ("file", "memory", "file"):
            training.forward_backward(rows, "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
            if save == "file":
                path = training.save_weights_for_sampler(f"v{len(versions)}").result().path
                client = service.create_sampling_client(model_path=path).result()
                assert drawn(path) == expected(client)
            else:
                client = training.save_weights_and_get_sampling_client().result()
            # The newest, in memory or in a file.
            assert drawn(run) == expected(client)
            versions.append(drawn(run))
        assert len({str(one) for one in versions}) == 4
        listed = httpx.get(f"{server.url}/v1/models", timeout=WAIT_S).json()
        names = [one["id"] for one in listed["data"]]
        assert listed["object"] == "list" and {"tiny", run, path} <= set(names) and len(names) == len(set(names))
        assert {one["max_model_len"] for one in listed["data"]} == {tiny.CONTEXT}
        assert not any(name.startswith("/") for name in names)
        assert httpx.get(f"{server.url}/v1/models/{path}", timeout=WAIT_S).json()["id"] == path
        assert not any(session.num_pending for session in server.service.samplers.values())
    # The run has left memory; its checkpoint has not.
    assert drawn(run) == versions[-1]


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "So:", [("add", '{"a": 1}')]),
        ('{"name": "add", "parameters": {}}', None, [("add", "{}")]),
        ("<tool_call>broken</tool_call>", "<tool_call>broken</tool_call>", []),
        ("no call", "no call", []),
    ],
)
def test_calls_of_tools_are_parsed_whole_and_streamed(renderer, text, content, calls):
    message = openai_results.message(text, [TOOL])
    assert message["content"] == content
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])] == calls
    assert openai_results.message(text, []) == {"role": "assistant", "content": text, "refusal": None}
    body = {**CHAT, "tools": [TOOL]}
    parts = openai_results.ChatParts(renderer, openai.parse(openai.ChatBody, json.dumps(body).encode()), [])
    tokens = renderer.encode(text)
    assert parts.next(0, TokenChunk(0, tokens[:3], [0.0] * 3, None)) is None
    last = parts.next(0, TokenChunk(0, tokens[3:], [0.0] * (len(tokens) - 3), "stop"))
    assert last["delta"]["content"] == content and last["finish_reason"] == ("tool_calls" if calls else "stop")
    assert [(one["index"], one["function"]["name"]) for one in last["delta"].get("tool_calls", [])] == [
        (index, name) for index, (name, _) in enumerate(calls)
    ]


def test_an_answer_begins_with_the_reasoning_that_its_prompt_opened():
    """Clients find the reasoning between the tags, one of which the prompt has printed."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    renderer = Renderer(tokenizer)
    said = "Two.</think>Four."
    tokens = [*renderer.encode(said), *renderer.answer_end]
    for messages, begun in ((MESSAGES, "<think>\n"), ([*MESSAGES, {"role": "assistant", "content": "<think>Well"}], "")):
        fields = openai.parse(openai.ChatBody, json.dumps({**CHAT, "messages": messages}).encode())
        prompt = renderer.prompt_tokens(messages)
        answer = openai_results.Answer(prompt, [Sample(tokens, [0.0] * len(tokens), "stop")])
        [choice] = openai_results.chat(renderer, fields, openai_results.Head("a", "b", "c", "d"), answer)["choices"]
        assert choice["message"]["content"] == begun + said
        parts = openai_results.ChatParts(renderer, fields, prompt)
        [opened], last = parts.opening(), parts.next(0, TokenChunk(0, tokens, [0.0] * len(tokens), "stop"))
        assert opened["delta"]["content"] + last["delta"]["content"] == begun + said


TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for one in messages %}{{ one.role }}:{{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}{{ 'brief:' if brief else 'next:' }}{% endif %}"
)


@pytest.mark.slow
def test_tools_and_their_calls_are_in_the_prompt(tmp_path):
    folder = tiny.save(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [MESSAGES[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "c1", "content": "7"})
    text = '<add>user:3+4=;assistant:{"name": "add", "arguments": {"a": 1}};tool:7;next:'
    with servertools.running(folder, tmp_path / "out", names=["tiny"]) as server:
        body = {**CHAT, "messages": turns, "tools": [TOOL], "max_tokens": 1}
        found = httpx.post(server.url + CHATS, json=body, timeout=WAIT_S).json()
        assert found["usage"]["prompt_tokens"] == len(text), found
        developer = {**body, "messages": [{"role": "developer", "content": "x"}], "tool_choice": "none"}
        assert httpx.post(server.url + CHATS, json=developer, timeout=WAIT_S).json()["usage"]["prompt_tokens"] == len(
            "system:x;next:"
        )
        options = {**developer, "chat_template_kwargs": {"brief": True}}
        answer = httpx.post(server.url + CHATS, json=options, timeout=WAIT_S).json()
        assert answer["usage"]["prompt_tokens"] == len("system:x;brief:")


# ---- refusals --------------------------------------------------------------------------------------------------------


REFUSED = [
    (CHATS, {"frequency_penalty": 0.5}, "frequency_penalty"),
    (CHATS, {"presence_penalty": 1}, "presence_penalty"),
    (CHATS, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHATS, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHATS, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHATS, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (CHATS, {"tool_choice": "required"}, "tool_choice"),
    (CHATS, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    (CHATS, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    (CHATS, {"tools": [TOOL], "skip_special_tokens": False}, "skip_special_tokens"),
    (CHATS, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
    (CHATS, {"messages": [{"role": "user", "content": "a", "name": "Bob"}]}, "messages"),
    (TEXTS, {"detokenize": False}, "detokenize"),
    (TEXTS, {"include_stop_str_in_output": "perhaps"}, "include_stop_str_in_output"),
    (CHATS, {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (CHATS, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHATS, {"functions": []}, "functions"),
    (CHATS, {"un-known": 1}, "un-known"),
    (CHATS, {"n": 0}, "n"),
    (CHATS, {"temperature": -1}, "temperature"),
    (CHATS, {"temperature": 1e-9}, "temperature"),
    (CHATS, {"top_p": 0}, "top_p"),
    (CHATS, {"stop": ["x"] * 17}, "stop"),
    (CHATS, {"stop": "x" * 201}, "stop"),
    (CHATS, {"messages": []}, "messages"),
    (CHATS, {"messages": [{"content": "no role"}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHATS, {"tools": [TOOL]}, "messages"),
    (CHATS, {"max_tokens": 97}, "max_tokens"),
    (CHATS, {"top_logprobs": 3}, "top_logprobs"),
    (CHATS, {"stream": True, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    (CHATS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHATS, {"stream": True, "stream_options": {"extra": True}}, "stream_options.extra"),
    (CHATS, {"model": "other"}, "model"),
    (CHATS, {"model": "runs/s1:train:0"}, "model"),
    (CHATS, {"model": "tinker://s1:train:0/weights/x"}, "model"),
    (TEXTS, {"suffix": "x"}, "suffix"),
    (TEXTS, {"best_of": 2}, "best_of"),
    (TEXTS, {"max_tokens": 0}, "max_tokens"),
    (TEXTS, {"stream": True, "echo": True}, "echo"),
    (TEXTS, {"stream": True, "logprobs": 2}, "logprobs"),
    (TEXTS, {"prompt": ["a"] * 4097}, "n"),
    (TEXTS, {"prompt": "\ud800"}, "prompt"),
    (TEXTS, {"prompt": "a" * 9601}, "prompt"),
    (TEXTS, {"prompt": ["a" * 40] * 2000, "max_tokens": 0, "echo": True, "logprobs": 0}, "prompt"),
    (CHATS, {"messages": [{"role": "user", "content": "a" * 9600}]}, "messages"),
    (GENERATE, {"sampling_params": {"ignore_eos": True, "stop": ["x"]}}, "sampling_params.ignore_eos"),
    (GENERATE, {"sampling_params": {"repetition_penalty": 1.1}}, "sampling_params.repetition_penalty"),
    (GENERATE, {"sampling_params": {"unknown": 1}}, "sampling_params.unknown"),
    (GENERATE, {"token_ids": [5, 99_999]}, "token_ids"),
    (TEXTS, {"prompt": [5, 99_999]}, "prompt"),
    (TEXTS, {"prompt": [[5], [99_999]], "stream": True}, "prompt"),
    (GENERATE, {"stream": True}, "stream"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=str)
def test_what_has_no_support_is_refused_by_its_name(post, path, fields, param):
    valid = {CHATS: CHAT, TEXTS: TEXT, GENERATE: IDS}[path]
    status, found = post(path, {**valid, **fields})
    assert status == (404 if param == "model" else 400), found
    assert found["error"]["param"] == param and set(found["error"]) == {"message", "type", "param", "code"}


def test_texts_have_the_stop_string_and_special_tokens_if_a_request_asks_for_them(http, post, renderer):
    """The prompt continues with several characters; the stop string is one that the text contains."""
    whole = post(TEXTS, TEXT)[1]["choices"][0]["text"]
    stop = whole[2:4]
    begin = whole[: whole.index(stop)]
    for path, body, text in (
        (TEXTS, TEXT, lambda choice: choice["text"]),
        (CHATS, {**CHAT, "max_tokens": 6}, lambda choice: choice["message"]["content"]),
    ):
        full = text(post(path, body)[1]["choices"][0])
        part = full[2:4]
        without, with_stop = (
            text(post(path, {**body, "stop": [part], "include_stop_str_in_output": included})[1]["choices"][0])
            for included in (False, True)
        )
        assert (without, with_stop) == (full[: full.index(part)], full[: full.index(part)] + part)
    asked = {**TEXT, "stop": [stop], "include_stop_str_in_output": True, "stream": True}
    streamed = events(http, TEXTS, asked)
    assert "".join(one["choices"][0]["text"] for one in streamed if one["choices"]) == begin + stop
    special = renderer.tokenizer.eos_token_id
    eos = renderer.tokenizer.decode([special])
    assert completed_text(renderer, [5, special], ()) == completed_text(renderer, [5, special], (), with_special=True)
    assert completed_text(renderer, [5, special], (), with_special=True, with_stop=True).endswith(eos)
    assert completed_text(renderer, [special, 5], (), with_special=True).startswith(eos)
    assert not completed_text(renderer, [special, 5], ()).startswith(eos)


def test_special_tokens_are_printed_if_a_request_asks_for_them(post, renderer):
    special = renderer.tokenizer.eos_token_id
    fields = openai.CompletionBody(model="tiny", prompt="a", skip_special_tokens=False, logprobs=0)
    answer = openai_results.Answer([5], [Sample([special, 65], [-1.0, -2.0], "length")])
    found = openai_results.completions(renderer, fields, openai_results.Head("cmpl", "x", "tiny", "f"), [answer])["choices"][0]
    eos = renderer.tokenizer.decode([special])
    assert found["text"].startswith(eos) and len(found["text"]) > len(eos)
    assert found["logprobs"]["text_offset"] == [0, len(eos)]
    assert post(TEXTS, {**TEXT, "skip_special_tokens": False})[0] == 200


@pytest.mark.slow
def test_a_template_that_reads_the_effort_gets_it(tmp_path):
    folder = tiny.save(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(f"{{{{ reasoning_effort }}}}{TEMPLATE}")
    with servertools.running(folder, tmp_path / "out", names=["tiny"]) as server:
        used = [
            httpx.post(server.url + CHATS, json={**CHAT, "max_tokens": 1, **fields}, timeout=WAIT_S).json()["usage"]
            for fields in ({}, {"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}})
        ]
    counts = [one["prompt_tokens"] for one in used]
    assert counts[1] == counts[2] == counts[0] + len("low")


def test_the_responses_interface_is_refused_by_its_name(post):
    status, found = post("/v1/responses", {"model": "tiny", "input": "a"})
    assert status == 400 and found["error"]["message"].startswith("responses: this server does not support the Responses API")


def test_fields_that_change_nothing_are_accepted(post):
    same = {name: values[0] for name, values in openai.NEUTRAL_VALUES.items()} | dict.fromkeys(openai.LABEL_FIELDS, "x")
    nulls = {"stop": None, "tools": None, "response_format": None, "seed": 5}
    assert post(CHATS, {**CHAT, **same, **nulls})[1]["choices"] == post(CHATS, CHAT)[1]["choices"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b'{"n": 1e999}'])
def test_a_body_that_is_no_request_is_refused(body):
    with pytest.raises(Refused) as refused:
        openai.parse(openai.ChatBody, body)
    assert refused.value.status == 400


def test_tokens_outside_the_vocabulary_are_refused(post):
    for path, field, body in ((TEXTS, "prompt", TEXT), (GENERATE, "token_ids", {})):
        status, found = post(path, {**body, field: [5, 9999]})
        assert status == 400 and found["error"]["message"].startswith(f"{field}: holds token 9999, but the vocabulary has ")
    with_stream = post(TEXTS, {**TEXT, "prompt": [5, -1]})
    assert with_stream[0] == 400


def test_an_error_of_a_stream_is_its_last_event(http):
    response = http.post(TEXTS, json={**TEXT, "prompt": [5, 9999], "stream": True})
    assert "holds token 9999" in json.loads(response.text.removeprefix("data: "))["error"]["message"]


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_stops_its_work(server, endless):
    endpoint = server.service.endpoint
    for stream in (False, True):
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=WAIT_S)
        connection.request("POST", TEXTS, json.dumps({**TEXT, "n": 60, "stream": stream}))
        wait_until(lambda: endpoint.num_unfinished)
        connection.close()
        wait_until(lambda: not endpoint.num_unfinished)
    assert [caller.pending_tokens for caller in endpoint.callers.values()] == [0] * len(endpoint.callers)


def test_a_short_answer_does_not_wait_for_a_long_one_of_the_same_client(server, post, endless):
    alone = post(TEXTS, TEXT)[1]["choices"]
    answers = []
    large = threading.Thread(target=lambda: answers.append(post(TEXTS, {**TEXT, "n": 60, "max_tokens": 90})))
    large.start()
    wait_until(lambda: server.service.endpoint.num_unfinished)
    assert post(TEXTS, TEXT)[1]["choices"] == alone and not answers
    endless.set()
    large.join()
    assert answers[0][0] == 200 and len(answers[0][1]["choices"]) == 60


def test_limits_are_refused_by_their_names(server, post, endless):
    config = server.service.config
    config.max_request_tokens, before = 100, config.max_request_tokens
    assert "server.max_request_tokens=100" in post(TEXTS, {**TEXT, "n": 50})[1]["error"]["message"]
    config.max_request_tokens, config.max_session_tokens, after = before, 400, config.max_session_tokens
    large = threading.Thread(target=lambda: post(TEXTS, {**TEXT, "n": 60}))
    large.start()
    wait_until(lambda: server.service.endpoint.num_unfinished)
    status, found = post(TEXTS, {**TEXT, "n": 60})
    assert (status, found["error"]["type"]) == (429, "rate_limit_error")
    assert "server.max_session_tokens=400" in found["error"]["message"]
    endless.set()
    large.join()
    config.max_session_tokens = after


@pytest.mark.slow
def test_a_shutdown_waits_and_then_ends_what_is_computed(tiny_folder, tmp_path, endless):
    with servertools.running(tiny_folder, tmp_path, names=["tiny"]) as server:
        answers = []
        body = {**TEXT, "n": 60}
        asked = threading.Thread(target=lambda: answers.append(httpx.post(server.url + TEXTS, json=body, timeout=WAIT_S)))
        asked.start()
        wait_until(lambda: server.service.endpoint.num_unfinished)
        server.call(lambda: drain(server.service, 0.2))
        asked.join()
        assert answers[0].status_code == 503 and "was dropped" in answers[0].json()["error"]["message"]
        refused = httpx.post(server.url + TEXTS, json=TEXT, timeout=WAIT_S)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_keys_are_those_of_the_other_routes(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COOKBOOK_API_KEYS", "tml-one,tml-two")
    with servertools.running(tiny_folder, tmp_path, names=["tiny"]) as server:
        for path in (CHATS, TEXTS, GENERATE, "/v1/models"):
            refused = httpx.post(server.url + path, json=TEXT, headers={"Authorization": "Bearer wrong"}, timeout=WAIT_S)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error", path
        for key in ("tml-one", "tml-two", "tml-one"):
            assert (
                httpx.post(
                    server.url + TEXTS, json=TEXT, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S
                ).status_code
                == 200
            )
        assert len(server.service.endpoint.callers) == 2


# ---- the openai client -----------------------------------------------------------------------------------------------


@pytest.fixture
def client(server):
    package = pytest.importorskip("openai", reason="the package openai is not installed: pip install openai")
    with package.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as one:
        yield one


@pytest.mark.slow
def test_the_openai_client_chats_completes_streams_and_lists(client, post):
    chat = client.chat.completions.create(**CHAT, n=2, logprobs=True, top_logprobs=2, temperature=0.5, top_p=0.9)
    assert [one.message.content for one in chat.choices] == [
        one["message"]["content"] for one in post(CHATS, {**CHAT, "n": 2, "temperature": 0.5, "top_p": 0.9})[1]["choices"]
    ]
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) >= 2 and chat.usage.total_tokens > 0
    options = {"n": 2, "temperature": 0.5, "top_p": 0.9, "stream_options": {"include_usage": True}}
    stream = client.chat.completions.create(**CHAT, **options, stream=True)
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [one.message.content for one in chat.choices] and usage == chat.usage
    completion = client.completions.create(**TEXT, echo=True, logprobs=2)
    assert completion.choices[0].text.startswith("3+4=") and completion.choices[0].logprobs.token_logprobs[0] is None
    assert (
        "".join(one.choices[0].text for one in client.completions.create(**TEXT, stream=True)) == completion.choices[0].text[4:]
    )
    assert "tiny" in [model.id for model in client.models.list()] and client.models.retrieve("tiny").owned_by == "cookbook"


@pytest.mark.slow
def test_the_page_shows_what_runs(server, capsys):
    """The example with ``openai``, and the one with curl."""
    pytest.importorskip("openai", reason="the package openai is not installed: pip install openai")
    page = (ROOT / "docs/operate/endpoint.md").read_text(encoding="utf-8")
    page = page.replace("http://127.0.0.1:8000", server.url)
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/operate/endpoint.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10
    [command] = re.findall(r"^\$ (curl .*?)\n```", page, re.DOTALL | re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    address, header, body = words[2], words[4], words[6]
    response = httpx.post(address, content=body, headers=dict([header.split(": ")]), timeout=WAIT_S)
    assert words[3:7:2] == ["-H", "-d"] and response.json()["usage"]["completion_tokens"] <= 4


@pytest.mark.slow
def test_the_openai_client_raises_its_errors(client):
    import openai as package

    with pytest.raises(package.BadRequestError) as refused:
        client.chat.completions.create(**CHAT, frequency_penalty=1.0)
    assert refused.value.param == "frequency_penalty"
    with pytest.raises(package.NotFoundError) as unknown:
        client.chat.completions.create(**{**CHAT, "model": "other"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(package.APIError, match="holds token 9999"):
        list(client.completions.create(**{**TEXT, "prompt": [5, 9999]}, stream=True))
