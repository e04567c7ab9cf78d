"""What the lines of a job say, in the library's own format, in OpenAI's, and in Parquet."""

import json
import math
import sys
from pathlib import Path

import pytest
from call_helpers import END, Plain, completed, make_folder, make_llm, make_tokenizer
from job_helpers import (
    StubEngine,
    arguments,
    as_job,
    journal_of,
    read_lines,
    run_stub,
    stop_after,
    write_lines,
)

from nanovllm import SamplingParams
from nanovllm.__main__ import main
from nanovllm.apps.jobs.errors import JobError
from nanovllm.apps.jobs.formats import RESULT, seed_of

GREEDY = ("--temperature", "0", "--max-tokens", "8")
TALK = [{"role": "user", "content": "the in the"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path):
    """A function: lines of the input, further arguments -> the records of the output."""

    def run(lines: list, *more: str) -> list[dict]:
        source = write_lines(tmp_path / "in.jsonl", lines)
        output = tmp_path / "out.jsonl"
        output.unlink(missing_ok=True)
        assert main(arguments(source, output, model, *more)) == 0
        return read_lines(output)

    return run


# The library's own.


def test_all_kinds_of_prompts_get_what_the_calls_return(run, model):
    with make_llm(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        text = llm.generate("the in", params, False)
        ids = llm.generate([3, 200, 7], params, False)
        chat = llm.chat(TALK, params, False)
        quiet = llm.chat(TALK, params, False, {"enable_thinking": False})
    lines = [
        {"prompt": "the in"},
        {"prompt_token_ids": [3, 200, 7]},
        {"messages": TALK},
        {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
    ]
    records = run(lines, *GREEDY)
    for record, (output,) in zip(records, (text, ids, chat, quiet), strict=True):
        assert record.pop("num_prompt_tokens") == len(output["prompt_token_ids"])
        assert [{**record, "line": 1}] == [{"line": 1, **one} for one in completed([output])]
    options = ("--chat-template-kwargs", '{"enable_thinking": false}')
    assert run(lines[2:3], *GREEDY, *options)[0]["token_ids"] == quiet[0]["token_ids"]
    assert quiet[0]["prompt_token_ids"] != chat[0]["prompt_token_ids"]


def test_tokens_are_those_of_transformers(run, model):
    prompt = [3, 200, 7]
    (record,) = run([{"prompt_token_ids": prompt}], *GREEDY, "--ignore-eos")
    assert record["token_ids"] == Plain(model).greedy(prompt, 8)


def test_a_lines_fields_go_before_the_flags(run):
    lines = [{"prompt": "the"}, {"prompt": "the", "max_tokens": 3, "n": 2, "logprobs": 1}]
    plain, rich = run(lines, *GREEDY)
    assert len(plain["token_ids"]) == 8 and "completions" not in plain
    assert rich["token_ids"] == plain["token_ids"][:3] and len(rich["completions"]) == 2
    for token, values in zip(rich["token_ids"], rich["logprobs"], strict=True):
        assert values[str(token)] == max(values.values()) < 0
    total = sum(max(values.values()) for values in rich["logprobs"])
    assert rich["cumulative_logprob"] == pytest.approx(total)


def test_a_prompt_is_scored_as_the_calls_score_it(run, model):
    line = {"prompt": "the in the", "max_tokens": 0, "prompt_logprobs": 1}
    (record,) = run([line], *GREEDY)
    with make_llm(model) as llm:
        (output,) = llm.generate(
            line["prompt"], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1), False
        )
    first, *others = record["prompt_logprobs"]
    assert first is None and record["token_ids"] == []
    assert others == [
        pytest.approx({str(token): value for token, value in one.items()})
        for one in output["prompt_logprobs"][1:]
    ]


def test_a_line_draws_by_its_own_seed_else_by_one_of_the_job_and_its_number(run, model):
    at_random = ("--temperature", "2", "--max-tokens", "6", "--seed", "11")
    lines = [{"prompt": "the", "seed": 4}, {"prompt": "the"}, {"prompt": "the", "seed": 4}]
    records = run(lines, *at_random)
    with make_llm(model) as llm:
        for record, seed in zip(records, (4, seed_of(11, 2), 4)):
            params = SamplingParams(temperature=2, max_tokens=6, seed=seed)
            assert llm.generate("the", params, False)[0]["token_ids"] == record["token_ids"]
    assert seed_of(11, 2) != seed_of(11, 3) != seed_of(12, 2)


@pytest.mark.parametrize("id", ["a", 7, None, 1.5, {"row": [1]}, "é\u2028"])
def test_an_id_is_repeated_with_results_and_errors(run, id):
    records = run([{"prompt": "the", "id": id}, {"prompt": 3, "id": id}, {"prompt": "in"}], *GREEDY)
    assert records[0]["id"] == records[1]["id"] == id
    assert "error" in records[1] and "id" not in records[2]


def test_fields_to_keep_are_copied_and_others_refused(run):
    lines = [{"prompt": "the", "source": "web", "page": 3}, {"prompt": "the", "adult": False}]
    kept, bad = run(lines, *GREEDY, "--keep", "source", "--keep", "page")
    assert (kept["source"], kept["page"]) == ("web", 3)
    assert "no field 'adult'" in bad["error"]


def test_a_line_with_a_prompt_may_keep_what_a_batch_calls_its_lines(run):
    (record,) = run([{"custom_id": "a", "prompt": "the"}], *GREEDY, "--keep", "custom_id")
    assert record["custom_id"] == "a" and record["text"]


def test_a_field_that_is_null_is_not_there_or_none_where_that_says_something(run):
    nothing = dict.fromkeys(("prompt", "prompt_token_ids", "messages"))
    lines = [
        nothing | {"prompt": "the", "temperature": None, "n": None, "logprobs": None},
        nothing | {"prompt_token_ids": [3], "max_tokens": None, "stop_token_ids": [*range(256)]},
        nothing,
    ]
    first, second, third = run(lines, "--temperature", "0", "--max-tokens", "2", "--logprobs", "1")
    assert len(first["token_ids"]) == 2 and "logprobs" not in first
    assert len(second["token_ids"]) == 1 and "logprobs" in second
    assert "has no prompt" in third["error"]


def test_what_a_result_says_itself_cannot_be_kept_of_a_line(model, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the", "text": "mine"}])
    assert main(arguments(source, tmp_path / "out.jsonl", model, "--keep", "text")) == 2
    assert (
        "--keep is text, which is a field of every result: rename the field"
        in capsys.readouterr().err
    )


# OpenAI's.


def batch_line(url: str, custom_id: str = "r", **body) -> dict:
    body = {"model": "some-model", "temperature": 0, "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_a_batch_gets_answers_in_openais_format(run, model):
    with make_llm(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (chat,) = llm.chat(TALK, params, False)
        (completion,) = llm.generate("the in", params, False)
    lines = [
        batch_line(CHAT, "a", messages=TALK, user="me", stream=False, stop=None),
        batch_line(COMPLETIONS, "b", prompt="the in", n=2),
    ]
    first, second = run(lines)
    assert (first["custom_id"], second["custom_id"]) == ("a", "b")
    assert first["error"] is second["error"] is None
    assert first["id"] != second["id"]
    assert first["response"]["status_code"] == second["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == model.name
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == chat["text"]
    assert choice["finish_reason"] == chat["finish_reason"] and choice["index"] == 0
    num_prompt, num_output = len(chat["prompt_token_ids"]), len(chat["token_ids"])
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    body = second["response"]["body"]
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == [completion["text"]] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 2 * len(completion["token_ids"])


def test_a_batchs_log_probabilities_name_the_tokens(run, model):
    lines = [
        batch_line(CHAT, messages=TALK, logprobs=True, top_logprobs=2, max_completion_tokens=4),
        batch_line(COMPLETIONS, prompt="the in", logprobs=2, max_tokens=4),
        batch_line(CHAT, messages=TALK, logprobs=True, max_tokens=4),
    ]
    chat, completion, alone = [record["response"]["body"]["choices"][0] for record in run(lines)]
    tokenizer = make_tokenizer()
    with make_llm(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
        (expected,) = llm.chat(TALK, params, False)
    texts = [tokenizer.decode([token]) for token in expected["token_ids"]]
    content = chat["logprobs"]["content"]
    assert [entry["token"] for entry in content] == texts
    for entry, token, values in zip(content, expected["token_ids"], expected["logprobs"]):
        assert math.isclose(entry["logprob"], values[token], rel_tol=1e-4)
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 2 and tops == sorted(tops, reverse=True) and tops[0] >= entry["logprob"]
    assert [entry["top_logprobs"] for entry in alone["logprobs"]["content"]] == [[]] * 4
    logprobs = completion["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 4
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    starts = [sum(map(len, logprobs["tokens"][:i])) for i in range(4)]
    assert logprobs["text_offset"] == starts


def test_parts_of_a_message_are_put_together(run):
    parts = [{"type": "text", "text": "the in"}, {"type": "text", "text": " the"}]
    lines = [
        batch_line(CHAT, messages=TALK),
        batch_line(CHAT, messages=[{"role": "user", "content": parts}]),
    ]
    first, second = [record["response"]["body"] for record in run(lines)]
    assert first["choices"] == second["choices"] and first["usage"] == second["usage"]


BAD_BATCH = {
    "is not valid JSON": "{",
    "custom_id is None": {"url": CHAT, "body": {}},
    "no field 'methods'": {**batch_line(CHAT), "methods": 1},
    "use 'POST'": {**batch_line(CHAT, messages=TALK), "method": "GET"},
    "url is '/v1/embeddings'": batch_line("/v1/embeddings", input="x"),
    "body is 3": {**batch_line(CHAT), "body": 3},
    "body has no messages": batch_line(CHAT),
    "body has no prompt": batch_line(COMPLETIONS),
    "no field 'prompt'": batch_line(CHAT, messages=TALK, prompt="the"),
    "prompt is ['a', 'b']": batch_line(COMPLETIONS, prompt=["a", "b"]),
    "messages is 'hi'": batch_line(CHAT, messages="hi"),
    "stream is True": batch_line(CHAT, messages=TALK, stream=True),
    "response_format is": batch_line(CHAT, messages=TALK, response_format={"type": "yaml"}),
    "tools is": batch_line(CHAT, messages=TALK, tools=[{"type": "function"}]),
    "temperature is -1": batch_line(CHAT, messages=TALK, temperature=-1),
    "did you mean temperature": batch_line(CHAT, messages=TALK, temprature=1),
    "logprobs is 2": batch_line(CHAT, messages=TALK, logprobs=2),
    "prompt_logprobs is 0": batch_line(COMPLETIONS, prompt="the", prompt_logprobs=0),
    "max_tokens is 0, but responses in this format have no field about the prompt": batch_line(
        COMPLETIONS, prompt="the", max_tokens=0
    ),
    "use 1 or more; or, for prompt_logprobs, write the input in the library's own": batch_line(
        CHAT, messages=TALK, max_completion_tokens=0
    ),
    "set logprobs to true": batch_line(CHAT, messages=TALK, top_logprobs=2),
    "use text, or parts of type 'text'": batch_line(
        CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]
    ),
    "no custom_id": {"prompt": "the"},
}


def test_a_line_of_a_batch_may_ask_for_json(run):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"the": {"const": "in"}}, "required": ["the"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    lines = [
        batch_line(CHAT, messages=TALK, max_tokens=40, response_format=wanted),
        batch_line(
            COMPLETIONS, prompt="the", max_tokens=4, response_format={"type": "json_object"}
        ),
        batch_line(COMPLETIONS, prompt="the", response_format={"type": "text"}),
        batch_line(COMPLETIONS, prompt="the", structured_outputs={"choice": ["the"]}),
        batch_line(CHAT, messages=TALK, response_format=wanted, structured_outputs={"regex": "a"}),
    ]
    *records, refused = run(lines)
    chat, cut, text, choice = [record["response"]["body"]["choices"][0] for record in records]
    assert json.loads(chat["message"]["content"]) == {"the": "in"}
    assert chat["finish_reason"] == choice["finish_reason"] == "stop"
    assert cut["text"].startswith("{") and text["text"][0] != "{" and choice["text"] == "the"
    assert "response_format and structured_outputs" in refused["error"]["message"]


def test_a_bad_line_of_a_batch_is_an_error_of_that_format(run):
    records = run([batch_line(CHAT, "good", messages=TALK), *BAD_BATCH.values()])
    assert records[0]["error"] is None
    for number, (problem, line, record) in enumerate(
        zip(BAD_BATCH, BAD_BATCH.values(), records[1:], strict=True), 2
    ):
        assert record["response"] is None
        assert record["error"]["line"] == number
        if problem != "no custom_id":
            assert problem in record["error"]["message"]
        assert record["custom_id"] == (line.get("custom_id") if isinstance(line, dict) else None)


@pytest.mark.parametrize("flags", [("--keep", "x"), ("--prompt-logprobs", "1")])
def test_what_answers_of_a_batch_cannot_say_is_refused_and_not_left_out(
    model, tmp_path, capsys, flags
):
    source = write_lines(tmp_path / "in.jsonl", [batch_line(CHAT, messages=TALK)])
    assert main(arguments(source, tmp_path / "out.jsonl", model, *flags)) == 2
    assert f"{flags[0]} is given, but results in OpenAI's" in capsys.readouterr().err


# Parquet.


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet", exc_type=ImportError)


@pytest.fixture
def table(parquet):
    import pyarrow

    count = 3000
    return pyarrow.table(
        {
            "id": pyarrow.array(range(count), pyarrow.int16()),
            "messages": [TALK if i % 3 == 0 else None for i in range(count)],
            "prompt": [f"the {i}" if i % 3 == 1 else None for i in range(count)],
            "prompt_token_ids": [[i % 200, 5] if i % 3 == 2 else None for i in range(count)],
            "max_tokens": [1 if i % 5 else None for i in range(count)],
            "stop_token_ids": [[*range(200)] if i % 4 == 0 else None for i in range(count)],
            "temperature": [-1.0 if i == 7 else 0.0 for i in range(count)],
            "source": ["web"] * count,
        }
    )


def test_parquet_gives_what_json_lines_give(run, parquet, table, model, tmp_path):
    table = table.slice(0, 40)
    lines = [
        {name: value for name, value in row.items() if value is not None}
        for row in table.to_pylist()
    ]
    flags = ("--max-tokens", "2", "--keep", "source", "--logprobs", "1", "--n", "2")
    flags += ("--prompt-logprobs", "0")
    expected = run(lines, *flags)
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(table, source, row_group_size=7)
    assert main(arguments(source, output, model, *flags)) == 0
    rows = parquet.read_table(output)
    assert str(rows.schema.field("id").type) == "int16"
    assert str(rows.schema.field("token_ids").type) == "list<element: int32>"
    for row, record in zip(rows.to_pylist(), expected, strict=True):
        for name in ("line", "id", "source", "text", "token_ids", "finish_reason", "error"):
            assert row[name] == record.get(name), name
        reason = record.get("stop_reason")
        assert row["stop_reason"] == (None if reason is None else str(reason))
        assert row["num_prompt_tokens"] == record.get("num_prompt_tokens")
        for one, other in zip(row["completions"] or [], record.get("completions", []), strict=True):
            assert one["text"] == other["text"]
            assert (one["stop_reason"] is None) == (other["stop_reason"] is None)
            assert one["cumulative_logprob"] == pytest.approx(other["cumulative_logprob"])
            for values, given in zip(one["logprobs"], other["logprobs"], strict=True):
                assert {str(token): pytest.approx(value) for token, value in values} == given
        if "prompt_logprobs" in record:
            assert row["prompt_logprobs"][0] is record["prompt_logprobs"][0] is None
            for values, given in zip(row["prompt_logprobs"], record["prompt_logprobs"]):
                assert values is given or [str(token) for token, _ in values] == list(given)
    assert {*rows["stop_reason"].to_pylist()} > {None}
    # And from JSON Lines to Parquet: what is repeated is text there.
    output = tmp_path / "other.parquet"
    assert main(arguments(tmp_path / "in.jsonl", output, model, *flags)) == 0
    others = parquet.read_table(output).to_pylist()
    assert [row["text"] for row in others] == [row["text"] for row in rows.to_pylist()]
    assert [row["id"] for row in others] == [str(i) for i in range(40)]


def test_a_job_on_parquet_goes_on_where_it_was_stopped(parquet, table, model, tmp_path):
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=500)
    job = as_job(tmp_path / "in.parquet", tmp_path / "out.parquet", model, keep=("source",))
    stop_after(job, 200)
    assert not job.output.exists()
    assert run_stub(job).startswith("3,000 lines done, 1,")
    assert parquet.read_table(job.output)["line"].to_pylist() == list(range(1, 3001))
    assert parquet.read_table(job.output)["id"].to_pylist() == list(range(3000))


def test_parquet_that_is_edited_in_place_during_a_job_is_noticed(
    parquet, table, model, tmp_path, monkeypatch
):
    monkeypatch.setattr("nanovllm.apps.jobs.files.PIECE", 512)
    source = tmp_path / "in.parquet"
    parquet.write_table(table, source, row_group_size=100)
    before = source.read_bytes()
    job = as_job(source, tmp_path / "out.parquet", model, keep=("source",))

    class Editing(StubEngine):
        def step(self):
            place = len(before) // 2
            source.write_bytes(before[:place] + b"#" + before[place + 1 :])
            return super().step()

    with pytest.raises(JobError, match="has changed while the job ran"):
        run_stub(job, Editing())
    assert not job.output.exists()
    source.write_bytes(before)
    run_stub(job)
    assert parquet.read_table(job.output).num_rows == table.num_rows


def test_parquet_has_a_column_for_each_field_of_a_result(parquet):
    from nanovllm.apps.jobs import parquet as rows

    assert {"line", *(name for name, _ in rows.RESULT)} == {*RESULT}


def test_what_is_kept_twice_is_one_column(parquet, model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the", "id": 3, "page": 4}])
    output, keep = tmp_path / "out.parquet", ["page", "id", "prompt", "page"]
    flags = [flag for name in keep for flag in ("--keep", name)]
    assert main(arguments(source, output, model, *GREEDY, *flags)) == 0
    assert parquet.read_table(output).column_names[:5] == ["line", "id", "page", "prompt", "text"]


def test_nulls_in_structs_of_parquet_are_fields_that_are_not_there(parquet, run, model, tmp_path):
    """All structs of a column have the same fields."""
    import pyarrow

    rows = [
        {"prompt": "the", "logit_bias": {"5": 100}, "id": {"first": 1}},
        {"prompt": "the", "logit_bias": {"6": 100}, "id": {"second": 2}},
    ]
    expected = run(rows, *GREEDY)
    assert [{*record["token_ids"]} for record in expected] == [{5}, {6}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    output = tmp_path / "rows.jsonl"
    assert main(arguments(tmp_path / "in.parquet", output, model, *GREEDY)) == 0
    records = read_lines(output)
    assert [record.pop("id") for record in records] == [
        {"first": 1, "second": None},
        {"first": None, "second": 2},
    ]
    assert [{**record, "id": row["id"]} for record, row in zip(records, rows)] == expected


def test_what_parquet_cannot_be_is_refused(parquet, table, model, tmp_path, capsys):
    flags = list(GREEDY)

    def refused(source: Path, output: Path, word: str) -> None:
        assert main(arguments(source, output, model, *flags)) == 2
        assert word in capsys.readouterr().err and not journal_of(output).exists()

    source, lines, output = (tmp_path / name for name in ("in.parquet", "in.jsonl", "out.parquet"))
    parquet.write_table(table, source)
    refused(source, output, "--keep source")
    source.write_text("nonsense")
    refused(source, output, "is not a Parquet file")
    write_lines(lines, [batch_line(CHAT, messages=TALK)])
    refused(lines, output, "are JSON Lines")


def test_without_pyarrow_it_says_what_to_install(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "nanovllm.apps.jobs.parquet", raising=False)
    monkeypatch.delattr("nanovllm.apps.jobs.parquet", raising=False)
    (tmp_path / "in.parquet").write_text("x")
    assert main(arguments(tmp_path / "in.parquet", tmp_path / "out.jsonl", model)) == 2
    assert "nanovllm[parquet]" in capsys.readouterr().err


def test_encode_makes_what_the_calls_are_given(model):
    with make_llm(model) as llm:
        assert llm.encode("the in") == llm.encode(["the in"])
        (output,) = llm.generate("the in", SamplingParams(max_tokens=1), False)
        assert llm.encode("the in") == [output["prompt_token_ids"]]
        options = {"enable_thinking": False}
        (output,) = llm.chat(TALK, SamplingParams(max_tokens=1), False, options)
        assert llm.encode_chat([TALK, TALK], options) == [output["prompt_token_ids"]] * 2
        assert llm.encode_chat(TALK) != llm.encode_chat(TALK, options)
        assert END not in llm.encode_chat(TALK)[0]
        for wrong in (3, [3], ["a", 3], [["a"]]):
            with pytest.raises(TypeError):
                llm.encode(wrong)
        with pytest.raises(TypeError, match="messages"):
            llm.encode_chat("hello")
    with pytest.raises(ValueError, match="closed"):
        llm.encode("the")
