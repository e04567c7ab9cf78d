"""The ways to call an LLM: chat, stream, requests one by one, stop strings; what they leave
behind.
"""

import copy
import dataclasses
import gc
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from call_helpers import (
    LaunchClock,
    check_empty,
    completed,
    generate,
    make_folder,
    make_llm,
    make_tokenizer,
    random_prompts,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.engine.metrics import percentiles
from nanovllm.frontend.detokenizer import TextStream, extend_texts
from nanovllm.frontend.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("empty_afterwards")
TEXT = "the naïve 你好, in 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🙂🙃 <|user|>the end"


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlap"])
def llm(folder, request):
    with make_llm(folder, overlap=request.param) as llm:
        yield llm


# Text as it grows


def grow(tokens, tokenizer, stops=(), min_tokens=0):
    """Feed tokens one by one -> (number of tokens until the end, pieces handed out, the stream)."""
    stream, pieces = TextStream(tuple(stops), min_tokens), []
    for i, token in enumerate(tokens):
        extend_texts([(stream, token, i == len(tokens) - 1)], tokenizer)
        pieces.append(stream.take())
        if stream.stopped:
            break
    return len(pieces), pieces, stream


@pytest.fixture(scope="module")
def bytes_of_text(tmp_path_factory):
    """A tokenizer with one token for each byte, and for a few words."""
    folder = tmp_path_factory.mktemp("bytes")
    make_tokenizer().save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """One of the other kind: "▁" for spaces, and a token for each byte of a character that it
    has no name for.
    """
    vocab = (
        {"▁Hello": 0, "▁world": 1, "s": 2, "▁": 3}
        | {f"<0x{i:02X}>": 4 + i for i in range(256)}
        | {"</s>": 260}
    )
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return load_tokenizer(folder)


TOKENIZERS = ["bytes_of_text", "sentencepiece"]


def decoded(tokenizer, tokens):
    (text,) = tokenizer.decode([tokens])
    return text


def test_characters_split_over_tokens_come_whole(bytes_of_text):
    tokens = make_tokenizer().encode(TEXT)
    assert len(tokens) > len(TEXT)
    _, pieces, _ = grow(tokens, bytes_of_text)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TEXT.replace("<|user|>", "")
    assert pieces.count("🙂") == 1 and pieces.count(" the") == 0 and pieces[0] == "the"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_tokens_add_up_to_what_is_decoded_at_once(name, request):
    """Cut anywhere, and with special tokens and some that only the model has among them."""
    tokenizer, r = request.getfixturevalue(name), random.Random(0)
    for _ in range(300):
        kinds = r.choices(
            [range(263), [3, 65, 97], [0xE4, 0xBD, 0xA0, 0xF0, 0x9F], [256, 260, 900], range(4)],
            k=2,
        )
        tokens = [r.choice(r.choice(kinds)) for _ in range(r.randint(1, 120))]
        _, pieces, stream = grow(tokens, tokenizer)
        assert "".join(pieces) == stream.text == decoded(tokenizer, tokens)


def test_spaces_and_byte_tokens_of_sentencepiece_come_whole(sentencepiece):
    tokens = [0, 1, 2, 3, *(4 + byte for byte in "你好🙂".encode()), 1, 0, 3, 3, 2]
    _, pieces, _ = grow(tokens, sentencepiece)
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[:3] == ["Hello", " world", "s"]
    assert "".join(pieces) == decoded(sentencepiece, tokens) == "Hello worlds 你好🙂 world Hello  s"


@pytest.mark.parametrize(
    "end", [[], [260], [999], [2]], ids=["cut", "eos", "beyond-the-tokenizer", "text"]
)
@pytest.mark.parametrize("stops", [(), ("好",), ("好!", "\ufffdx")])
def test_a_character_that_is_cut_changes_no_byte_token_that_was_shown(sentencepiece, end, stops):
    """Where the last character of a run of byte tokens is cut, the decoder makes nothing of all
    of the run.
    """
    whole, cut = [4 + byte for byte in "你好".encode()], [4 + byte for byte in "你🙂".encode()[:-1]]
    for tokens in (whole, cut, whole + [260] + cut, whole + [2] + cut + [3] + whole):
        _, pieces, stream = grow(tokens + end, sentencepiece, stops)
        text = decoded(sentencepiece, tokens + end)
        assert (
            "".join(pieces)
            == stream.text
            == min(text.split(stop)[0] for stop in stops or ("none",))
        )


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer):
        self.is_silent = tokenizer.is_silent
        self.is_byte = tokenizer.is_byte
        self._decode = tokenizer.decode
        self.num_decoded = 0

    def decode(self, outputs, with_special=()):
        self.num_decoded += sum(map(len, outputs))
        return self._decode(outputs, with_special)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "cycle",
    [[0xFF], [0xE4], [0xE4, 0xBD], [256, 900], [65, 256], [70, 71], [3], [3, 0xE4]],
    ids=str,
)
def test_what_is_decoded_for_a_token_does_not_grow_with_the_text(name, cycle, request):
    """Invalid bytes without end, special tokens without end, and a token that only another one
    completes.
    """
    tokenizer = Counting(request.getfixturevalue(name))
    tokens = (cycle * 4000)[:4000]
    _, pieces, _ = grow(tokens, tokenizer, stops=("never there",))
    assert tokenizer.num_decoded < 40 * 4000
    assert "".join(pieces) == decoded(tokenizer, tokens)


def test_a_stop_string_is_found_at_the_first_token_that_completes_it_and_nothing_of_it_is_shown(
    bytes_of_text,
):
    r = random.Random(1)
    letters = make_tokenizer().encode("ab你")  # five tokens
    num_stopped = 0
    for _ in range(400):
        tokens = [r.choice(letters) for _ in range(r.randint(1, 24))]
        stops = ["".join(r.choices("aab你", k=r.randint(1, 4))) for _ in range(r.randint(1, 3))]
        min_tokens = r.choice([0, 0, r.randint(1, 8)])
        count, pieces, stream = grow(tokens, bytes_of_text, stops, min_tokens)
        assert "".join(pieces) == stream.text
        end = next(
            (
                n
                for n in range(1, len(tokens) + 1)
                if first_stop(bytes_of_text, tokens, n, stops, min_tokens) is not None
            ),
            None,
        )
        if end is None:
            assert not stream.stopped and stream.text == decoded(bytes_of_text, tokens)
        else:
            num_stopped += 1
            assert stream.stopped and count == end
            assert (
                stream.text
                == decoded(bytes_of_text, tokens[:end])[
                    : first_stop(bytes_of_text, tokens, end, stops, min_tokens)
                ]
            )
    assert num_stopped > 100


def first_stop(tokenizer, tokens, count, stops, min_tokens):
    """Where the first stop string begins in the text of `count` tokens that ends after the text
    of min_tokens, if any.
    """
    if count <= min_tokens:
        return None
    text = decoded(tokenizer, tokens[:count])
    if count < len(tokens) and text.endswith("\ufffd"):
        # An incomplete character is not text yet, and what was before it has been looked at.
        text = ""
    begin = len(complete(decoded(tokenizer, tokens[:min_tokens]))) if min_tokens else 0
    found = [
        at
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > begin
    ]
    return min(found, default=None)


def complete(text):
    return text.removesuffix("\ufffd")


# Stop strings in the engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_ends_the_output_and_cuts_the_text(llm, temperature):
    prompts = random_prompts(20)
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=3)
    stopped = 0
    for prompt, before in zip(prompts, generate(llm, prompts, params)):
        text, ids = before["text"], before["token_ids"]
        at = next((i for i in range(3, len(text) - 3) if "\ufffd" not in text[i : i + 3]), None)
        if at is None:
            continue
        stopped += 1
        stop = text[at : at + 3]
        stopping = SamplingParams(
            temperature=temperature, max_tokens=30, seed=3, stop=["never there", stop]
        )
        (output,) = generate(llm, [prompt], stopping)
        assert output["finish_reason"] == "stop"
        assert output["text"] == text[: text.index(stop)]
        count = len(output["token_ids"])
        assert output["token_ids"] == ids[:count]
        assert stop in decoded(llm._tokenizer, ids[:count]) and stop not in decoded(
            llm._tokenizer, ids[: count - 1]
        )
    assert stopped > 8


def test_sequences_beside_one_that_is_stopped_go_on_undisturbed(llm):
    prompts = random_prompts(8, seed=2)
    params = [SamplingParams(seed=i, max_tokens=25, ignore_eos=True) for i in range(8)]
    before = generate(llm, prompts, params)
    stop = [char for char in before[3]["text"][2:] if char != "\ufffd"]
    params[3] = SamplingParams(seed=3, max_tokens=25, ignore_eos=True, stop=stop)
    after = generate(llm, prompts, params)
    assert after[3]["finish_reason"] == "stop" and len(after[3]["token_ids"]) < 25
    assert before[:3] + before[4:] == after[:3] + after[4:]


def test_nothing_stops_before_min_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (before,) = generate(llm, [[1, 2, 3]], params)
    chars = list({char for char in before["text"] if char != "\ufffd"})
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=chars, min_tokens=6)
    (output,) = generate(llm, [[1, 2, 3]], params)
    assert (
        len(output["token_ids"]) > 6
        and output["token_ids"] == before["token_ids"][: len(output["token_ids"])]
    )


# stream


def test_streams_add_up_to_what_generate_returns(llm):
    prompts = random_prompts(12, seed=3)
    params = [
        SamplingParams(seed=i, max_tokens=1 + 3 * i, temperature=1.3, stop="th" if i % 3 else ())
        for i in range(12)
    ]
    texts, ids, reasons = [""] * 12, [[] for _ in range(12)], [None] * 12
    for index, text, new_ids, reason in llm.stream(prompts, params):
        assert reasons[index] is None
        text.encode()
        texts[index] += text
        ids[index] += new_ids
        reasons[index] = reason
    expected = generate(llm, prompts, params)
    assert texts == [output["text"] for output in expected]
    assert ids == [output["token_ids"] for output in expected]
    assert reasons == [output["finish_reason"] for output in expected]


def test_streams_of_byte_tokens_add_up_to_what_generate_returns(folder, sentencepiece, tmp_path):
    for path in folder.iterdir():
        if "token" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    for path in sentencepiece._folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    prompts = random_prompts(30, seed=4)
    params = [SamplingParams(seed=i, max_tokens=1 + i, top_k=9) for i in range(30)]
    with make_llm(tmp_path) as llm:
        expected = [output["text"] for output in generate(llm, prompts, params)]
        texts = [""] * 30
        for index, text, _, _ in llm.stream(prompts, params):
            texts[index] += text
        stopping = [dataclasses.replace(one, stop="never there") for one in params]
        assert [output["text"] for output in generate(llm, prompts, stopping)] == texts == expected
    assert any("\ufffd" in text for text in texts)


def test_stream_chat_yields_what_chat_returns(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    chats = [[{"role": "user", "content": "in 你"}], [{"role": "user", "content": "a"}]]
    for messages, options in ((chats, None), (chats[0], {"enable_thinking": False})):
        expected = llm.chat(messages, params, use_tqdm=False, chat_template_kwargs=options)
        texts, ids = [""] * len(expected), [[] for _ in expected]
        for index, text, new_ids, _ in llm.stream_chat(messages, params, options):
            texts[index] += text
            ids[index] += new_ids
        assert texts == [output["text"] for output in expected]
        assert ids == [output["token_ids"] for output in expected]


@pytest.mark.parametrize("name", ["stream", "stream_chat"])
def test_a_stream_of_several_completions_is_refused_when_it_is_asked_for(llm, name):
    what = [1] if name == "stream" else [{"role": "user", "content": "a"}]
    with pytest.raises(
        ValueError, match=r"sampling_params\[0\]\.n is 2: stream one completion of a prompt, or"
    ):
        getattr(llm, name)(what, SamplingParams(n=2))


def test_stream_yields_while_sequences_run(llm):
    seen = {0: 0, 1: 0}
    for index, _, new_ids, reason in llm.stream(
        [[1], [2, 3]], SamplingParams(max_tokens=10, ignore_eos=True)
    ):
        assert len(new_ids) == 1
        seen[index] += 1
        assert (reason == "length") == (seen[index] == 10)
        assert abs(seen[0] - seen[1]) <= 1
    assert seen == {0: 10, 1: 10}


def test_closing_a_stream_early_frees_everything_it_holds(llm):
    stream = llm.stream(random_prompts(20), SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(30):
        next(stream)
    assert any(llm.engine.scheduler.blocks.ref_counts)
    stream.close()
    check_empty(llm)
    llm.stream([[1]]).close()  # one that never began
    for _ in llm.stream(random_prompts(5)):
        break
    check_empty(llm)


def test_a_stream_that_is_collected_as_garbage_inside_a_step_disturbs_no_other(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = generate(llm, [[5] * 32], params)
    stream = llm.stream([[1, 2, 3], [4]], params)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle

    def collect(output, logits):
        if not output:
            gc.collect()
        return logits

    params = dataclasses.replace(params, logits_processors=[collect])
    assert generate(llm, [[5] * 32], params) == [expected]
    assert llm.metrics()["running"] == 0


@pytest.mark.parametrize("catches", [False, True])
def test_a_call_in_the_middle_of_a_step_is_refused_and_harms_nothing(llm, catches):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (expected,) = generate(llm, [[5] * 32], params)
    calls = [
        lambda: llm.score([[1]], [[2]], use_tqdm=False),
        lambda: llm.generate([[1]], use_tqdm=False),
        lambda: list(llm.stream([[1]])),
        lambda: llm.abort(0),
        lambda: llm.sleep(),
        lambda: llm.step(),
    ]
    for call in calls:

        def process(output, logits, call=call):
            try:
                call()
            except RuntimeError:
                if not catches:
                    raise
            return logits

        calling = dataclasses.replace(params, logits_processors=[process])
        if catches:
            assert generate(llm, [[5] * 32], calling) == [expected]
            continue
        with pytest.raises(RuntimeError, match="in the middle of its own step.*: call it between"):
            generate(llm, [[5] * 32], calling)
        check_empty(llm)
        assert generate(llm, [[5] * 32], params) == [expected]


def test_generate_inside_a_stream_disturbs_neither(llm):
    params = SamplingParams(temperature=0, max_tokens=12)
    inner, outer = random_prompts(6, seed=5), random_prompts(4, seed=6)
    expected = generate(llm, inner, params), generate(llm, outer, params)
    ids = [[] for _ in outer]
    for count, (index, _, new_ids, _) in enumerate(llm.stream(outer, params)):
        ids[index] += new_ids
        if count == 5:
            assert generate(llm, inner, params) == expected[0]
    assert ids == [output["token_ids"] for output in expected[1]]


def test_an_interrupt_leaves_the_llm_empty_and_usable(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = generate(llm, random_prompts(5), params)
    launch, count = llm.engine.runner.launch, iter(range(100))

    def interrupted(batch):
        if next(count) == 4:
            raise KeyboardInterrupt
        return launch(batch)

    def run_stream():
        return list(llm.stream(random_prompts(5), params))

    def run_steps():
        for prompt in random_prompts(5):
            llm.add_request(prompt, params)
        while llm.has_unfinished():
            llm.step()

    for call in (lambda: generate(llm, random_prompts(5), params), run_stream, run_steps):
        count = iter(range(100))
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
        check_empty(llm)
        assert generate(llm, random_prompts(5), params) == expected


# Requests one by one


def test_requests_may_come_while_others_run(llm):
    prompts = random_prompts(9, seed=7)
    params = [SamplingParams(temperature=0, max_tokens=5 + i) for i in range(9)]
    expected = generate(llm, prompts, params)
    waiting, index_of, got = list(range(9)), {}, {}
    while waiting or llm.has_unfinished():
        if waiting:
            i = waiting.pop(0)
            index_of[llm.add_request(prompts[i], params[i])] = i
        for output in completed(llm.step()):
            got[index_of[output.pop("id")]] = output
    assert [got[i] for i in range(9)] == expected
    assert llm.step() == []


def test_abort_drops_a_request_wherever_it_stands(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = generate(llm, [[5, 6]], params)[0]
    ids = [llm.add_request(prompt, params) for prompt in [[1], [2, 3], [5, 6], *random_prompts(12)]]
    llm.abort(ids[0])  # before it runs
    for _ in range(5):
        assert llm.step() == []
    for request_id in [ids[1], *ids[3:]]:
        llm.abort(request_id)  # while it runs, or waits
    outputs = []
    while llm.has_unfinished():
        outputs += llm.step()
    assert completed(outputs) == [{"id": ids[2], **expected}]
    with pytest.raises(ValueError, match=f"request_id is {ids[1]}"):
        llm.abort(ids[1])


def test_requests_beside_one_that_is_aborted_before_its_first_token_are_counted(llm):
    requests = [
        llm.add_request([1, 2, i], SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(3)
    ]
    llm.step()
    outputs = []
    llm.abort(requests[2])
    while llm.has_unfinished():
        outputs += llm.step()
    assert sorted(output["id"] for output in outputs) == requests[:2]


def test_aborting_the_last_request_frees_what_is_in_flight(llm):
    request_id = llm.add_request([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        llm.step()
    llm.abort(request_id)
    check_empty(llm)


def test_threads_wait_for_each_other(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[i, i + 1] for i in range(8)]
    expected = [generate(llm, [prompt], params) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        streams = [
            pool.submit(lambda p=p: [ids for *_, ids, _ in llm.stream([p], params)])
            for p in prompts
        ]
        outputs = [pool.submit(generate, llm, [prompt], params) for prompt in prompts]
        assert [future.result(60) for future in outputs] == expected
        for stream, (output,) in zip(streams, expected):
            assert [token for ids in stream.result(60) for token in ids] == output["token_ids"]


def test_generate_keeps_the_outputs_of_requests_that_finish_beside_it(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    request_id = llm.add_request("in the", params)
    expected = generate(llm, ["in the", "hello"], params)
    assert llm.has_unfinished()
    assert completed(llm.step()) == [{"id": request_id, **expected[0]}]


# chat


def test_chat_completes_what_the_template_writes(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    chats = [
        [{"role": "user", "content": "in 你"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ]
    texts = ["<|user|>in 你<|assistant|>", "<|user|>a<|assistant|>b<|user|>c<|assistant|>"]
    expected = generate(llm, texts, params)
    assert completed(llm.chat(chats, params, use_tqdm=False)) == expected
    assert completed(llm.chat(chats[0], params, use_tqdm=False)) == expected[:1]
    no_thinking = llm.chat(
        chats[0], params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert completed(no_thinking) == generate(llm, [texts[0] + "no"], params)
    assert llm.chat([], params, use_tqdm=False) == []


def test_a_messages_parts_of_text_are_put_together(llm):
    """Which the template knows nothing of."""
    params = SamplingParams(temperature=0, max_tokens=8)
    parts = [{"type": "text", "text": "in"}, {"type": "text", "text": " 你"}]
    whole, split = ([{"role": "user", "content": content}] for content in ("in 你", parts))
    for options in (None, {"chat_template": "{{ messages[0].content }}"}):
        expected, (output,) = (
            llm.chat(one, params, use_tqdm=False, chat_template_kwargs=options)
            for one in (whole, split)
        )
        assert output["prompt_token_ids"] == expected[0]["prompt_token_ids"]
        assert llm.encode_chat(split, options) == [output["prompt_token_ids"]]
    assert split[0]["content"] == parts  # the caller's


@pytest.mark.parametrize("content", [dict(content=None), dict()], ids=["none", "left-out"])
def test_an_assistant_that_calls_a_tool_needs_no_content(llm, content):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], **content}
    chat = [{"role": "user", "content": "in"}, call]
    adds = "{% for m in messages %}{{ m.role + ':' + m['content'] + ' ' }}{% endfor %}"
    writes = "{% for m in messages %}{{ m.content | trim }} {% endfor %}"
    for template, text in {adds: "user:in assistant: ", writes: "in  "}.items():
        written = llm.encode_chat(chat, {"chat_template": template})
        assert written == llm.encode([text])
    assert llm.encode_chat(chat) == llm.encode(["<|user|>in<|assistant|><|assistant|>"])
    assert chat[1] is call and call.get("content") is None  # the caller's


@pytest.mark.parametrize("options", [["enable_thinking"], "no thinking", 5, True])
def test_chat_template_kwargs_that_are_no_dict_are_refused_by_name(llm, options):
    for call in (llm.chat, llm.stream_chat, llm.encode_chat):
        with pytest.raises(TypeError, match="^chat_template_kwargs is .*: give a dict"):
            call([{"role": "user", "content": "a"}], chat_template_kwargs=options)


@pytest.mark.parametrize(
    "options", [{"truncation": True, "max_length": 4}, {"return_tensors": "pt"}, {"tokenize": True}]
)
def test_chat_template_kwargs_that_say_how_to_make_tokens_are_refused(llm, options):
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=f"kwargs has '{next(iter(options))}', .* leave it out"):
        llm.encode_chat(chat, options)
    assert llm.encode_chat(chat, dict.fromkeys(options, False)) == llm.encode_chat(chat)


@pytest.mark.parametrize(
    "messages, error, match",
    [
        ([{"role": "user", "content": [{"type": "image"}]}], TypeError, "holds {'type': 'image'}"),
        ([{"role": "user", "content": ["a"]}], TypeError, r"messages\[0\] holds 'a': use text, or"),
        ("hello", TypeError, "messages is a str"),
        (["hello"], TypeError, r"messages\[0\] is 'hello'"),
        ([[{"role": "user", "content": "a"}], ["b"]], TypeError, r"messages\[1\]"),
        (
            [{"role": "wizard", "content": "a"}],
            ValueError,
            r"messages\[0\] does not fit.*unknown role wizard",
        ),
        ([{"role": "user", "content": "a" * 300}], ValueError, r"messages\[0\] has 302 tokens"),
    ],
    ids=["image", "part-of-str", "str", "list-of-str", "no-dict", "template-error", "too-long"],
)
def test_wrong_messages_raise_before_anything_runs(llm, messages, error, match):
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(error, match=match):
            call(messages)


def test_without_a_template_or_a_tokenizer_the_error_says_what_to_do(tmp_path):
    messages = [{"role": "user", "content": "a"}]
    with make_llm(make_folder(tmp_path / "no-template", chat=False)) as llm:
        with pytest.raises(ValueError, match="no chat template: use generate, or give one"):
            llm.chat(messages)
        own = {"chat_template": "{{ messages[0].content }}"}
        expected = generate(llm, ["a"], SamplingParams(temperature=0))
        assert completed(llm.chat(messages, SamplingParams(temperature=0), False, own)) == expected
    with make_llm(make_folder(tmp_path / "no-tokenizer", tokenizer=False)) as llm:
        with pytest.raises(ValueError, match="no chat template"):
            llm.chat(messages)
        with pytest.raises(ValueError, match="stop needs text.*use stop_token_ids"):
            generate(llm, [[1]], SamplingParams(stop="a"))
        items = list(llm.stream([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True)))
        assert [(text, len(ids), reason) for _, text, ids, reason in items] == [
            ("", 1, None)
        ] * 2 + [("", 1, "length")]


def test_no_call_enqueues_anything_if_one_request_is_wrong(llm):
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=r"prompts\[1\] holds token id 300"):
            call([[1], [300]])
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        llm.add_request([])
    with pytest.raises(TypeError, match="prompts"):
        llm.add_request(None)


def test_a_closed_llm_says_so(folder):
    llm = make_llm(folder)
    stream = llm.stream([[1]], SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)
    llm.close()
    for call in (lambda: llm.generate([[1]]), lambda: llm.step(), lambda: next(stream)):
        with pytest.raises(ValueError, match="closed"):
            call()


# metrics


def test_metrics_count_requests_tokens_and_what_the_prefix_cache_had(folder):
    prompts = [list(range(40)), list(range(40)) + [5] * 10, [7] * 20]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 1, 9)]
    with make_llm(folder) as llm:
        metrics = llm.metrics()
        assert metrics["total"]["requests"] == 0 and metrics["total"]["time_to_first_token"] is None
        generate(llm, [[1, 2]], SamplingParams(max_tokens=1))
        generate(llm, prompts, params)
        call = llm.metrics()["last_call"]
        assert (call["requests"], call["prompt_tokens"], call["output_tokens"]) == (3, 110, 15)
        # Two blocks that the first prompt had just made.
        assert call["prefix_cache_hit_rate"] == 32 / 110
        assert call["kv_cache_use"] == (3 + 2 + 2) / 128
        assert call["time_to_first_token"]["median"] > 0
        list(llm.stream(prompts, params))
        metrics = llm.metrics()
        call, total = metrics["last_call"], metrics["total"]
        assert call["requests"] == 3 and call["prefix_cache_hit_rate"] == (32 + 48 + 16) / 110
        assert (total["requests"], total["prompt_tokens"], total["output_tokens"]) == (7, 222, 31)
        assert metrics["running"] == metrics["waiting"] == 0 and metrics["kv_cache_use"] == 0.0
        for prompt in random_prompts(12):
            llm.add_request(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
        llm.step()
        metrics = llm.metrics()
        assert (metrics["running"], metrics["waiting"]) == (8, 4) and metrics["kv_cache_use"] > 0


def test_metrics_count_preemptions(folder):
    with make_llm(folder, num_kvcache_blocks=12, enable_prefix_caching=False) as llm:
        generate(llm, random_prompts(10), SamplingParams(max_tokens=60, ignore_eos=True))
        metrics = llm.metrics()["total"]
        assert metrics["preemptions"] == llm.engine.scheduler.num_preemptions > 0
        assert metrics["requests"] == 10 and metrics["output_tokens"] == 600
        assert metrics["kv_cache_use"] == 1.0


def test_latencies_are_read_off_the_clock(folder, monkeypatch):
    """Without overlap a step is committed when it has been launched."""
    with make_llm(folder, max_num_seqs=2, overlap=False) as llm:
        LaunchClock(llm, monkeypatch)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 4, 3, 1)]
        generate(llm, [[1], [2], [3], [4]], params)
        call = llm.metrics()["last_call"]
    # The first two need steps 1 to 4; then the others have their first token after step 5.
    assert call["time_to_first_token"] == {"median": 1.0, "p99": 5.0}
    assert call["time_per_output_token"] == {"median": 1.0, "p99": 1.0}


def test_percentiles():
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"median": 3.0, "p99": 3.0}
    assert percentiles([float(i) for i in range(100, 0, -1)]) == {"median": 50.0, "p99": 99.0}


def test_an_llm_that_is_to_be_pickled_or_copied_says_what_to_do(llm):
    """As for a pool of processes that is given a method of it."""
    for of in (copy.copy, copy.deepcopy, pickle.dumps):
        for what in (llm, llm.generate):
            if (of, what) != (copy.copy, llm.generate):  # which is itself
                with pytest.raises(TypeError, match="cannot be pickled or copied.*make an LLM"):
                    of(what)
