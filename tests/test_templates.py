"""Chat templates: the text is what transformers writes, and no template holds the process."""

import json
import os
import signal
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from call_helpers import make_folder, make_tokenizer
from job_helpers import arguments, read_lines, write_lines
from process_helpers import alarms

from nanovllm.__main__ import main
from nanovllm.apps.jobs.formats import Defaults, NativeFormat
from nanovllm.frontend import sandbox
from nanovllm.frontend.chat import write_chats
from nanovllm.frontend.sandbox import BoundedEnvironment, TooMuchWorkError, render
from nanovllm.sampling_params import SamplingParams

# In the styles of known families, with what their templates use of Jinja.
TEMPLATES = {
    "chatml": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not (
        message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<r>\\n' ~ content ~ '\\n</r>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}
{%- endif %}""",
    "headers": """{{- bos_token or '' }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<h>system</h>\\n\\nToday: " + date_string + "\\n\\n" + system + "<eot>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<h>' + message['role'] + '</h>\\n\\n' + message['content'] | trim + '<eot>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<eot>' }}
    {%- else %}
        {{- { "output": message.content } | tojson + "<eot>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant</h>\\n\\n' }}{%- endif %}""",
    "alternating": """{% set chat = messages | rejectattr("role", "equalto", "tool") | list %}
{%- if chat[0].role == "system" %}{% set first = chat[0].content %}{% set chat = chat[1:] %}
{%- endif %}
{%- set ns = namespace() %}{% set ns.index = 0 %}
{%- for message in chat if message.content %}
    {%- if message.role not in ["user", "assistant"] %}
        {{- raise_exception("only user and assistant, not " + message.role) }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message.role == "user" %}
        {{- "[INST] " + (first ~ "\\n" if loop.first and first is defined else "") }}
        {{- message.content | trim | replace("  ", " ") }}{{ " [/INST]" }}
    {%- else %}{{ " " ~ message.content.strip() ~ (eos_token or "") }}{% endif %}
{%- else %}nothing{% endfor %} {{ ns.index // 2 }} {{ ns.index % 2 }} {{ 2 ** 3 - 1 / 2 }}""",
    "macros": """{%- macro type_of(spec, depth=0) -%}
    {%- if spec.type == 'array' %}{{ type_of(spec['items'], depth + 1) }}[]
    {%- elif spec.enum %}{{ '"' ~ spec.enum | join('" | "') ~ '"' }}
    {%- elif spec.type == 'object' %}{ {% for key, value in spec.properties.items() -%}
        {{ key }}: {{ type_of(value, depth + 1) }}{{ ', ' if not loop.last }}
    {%- endfor %} }
    {%- else %}{{ {'integer': 'number', 'string': 'string'}.get(spec.type, 'any') }}{% endif %}
{%- endmacro %}
{%- macro wrapped(role) %}<{{ role | upper }}>{{ caller(role) }}</{{ role | upper }}>{% endmacro %}
{%- for tool in tools or [] %}{{ tool.function.name }}: {{ type_of(tool.function.parameters) }}
{% endfor %}
{%- for message in messages %}
    {%- set later = namespace(found=false) %}
    {%- for other in messages[loop.index:] %}
        {%- if other.role == 'assistant' %}{%- set later.found = true %}{%- break %}{%- endif %}
        {%- if other.role == 'tool' %}{%- continue %}{%- endif %}
    {%- endfor %}
    {%- call(role) wrapped(message.role) %}{{ role[0] }}{{ later.found }}
        {%- generation %}{{ message.content | default('none', true) | indent(2, first=True) }}
        {%- endgeneration %}
    {%- endcall %}
    {%- if message.reasoning is defined %}|{{ message.thinking }}|{% endif %}
{%- endfor %}
{%- set text %}{% filter capitalize %}ends{% endfilter %}{% endset %}{{ text | center(9) ~ '.' }}
{{- messages | map(attribute='role') | unique | sort(reverse=true) | join(',') }}
{{- '%-6s|%03d' | format('a', 7) }}{{ '{:>4}|{x}'.format(5, x='y') }}{{ "%s-%s" % ("a", 1.5) }}
{{- messages | groupby('role') | map('first') | list }}{{ (3.14159 | round(2)) }}
{{- ['b', 'a'] | sort | tojson(separators=(',', ':')) }}{{ [1, 2] + [3] * 2 }}{{ 'é' | tojson }}
{{- messages | selectattr('role', 'in', ['user']) | map(attribute='content') | list | length }}
{{- dict(a=1, **{'b': 2}) | dictsort }}{{ range(5) | batch(2, 'x') | list }}{{ 1 if 1 < 2 <= 2 }}
{{- documents | length if documents }}{{ messages[0] is mapping }}{{ 'a' not in 'bc' }}
{{- joiner is defined }}{{ undefined_name }}{{ none }}{{ true }}{{ '<a>' | e }}{{ '<a>' | safe }}
{%- if add_generation_prompt %}go{% endif %}""",
}
SYSTEM = {"role": "system", "content": "  Be brief. "}
USER = {"role": "user", "content": "naïve  你好 🙂\n\n line "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n an answer\n "}
THOUGHT = {"role": "assistant", "content": "so", "reasoning": "because"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}],
}
TOOL = {"role": "tool", "content": '{"x": 1}', "name": "f"}
CHATS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
    [SYSTEM, USER, CALL, TOOL, TOOL, THOUGHT, USER],
    [USER, CALL, TOOL],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Says <a> & 'b'.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "array", "items": {"type": "integer"}},
                    "b": {"enum": ["x", "y"]},
                },
            },
        },
    }
]


def add(a: int) -> int:
    """Add.

    Args:
        a: A number.
    """
    return a


OPTIONS = [
    {},
    {"add_generation_prompt": False},
    {"enable_thinking": False, "date_string": "1 May 2026"},
    {"tools": TOOLS, "documents": [{"title": "a", "text": "b"}]},
    {"tools": [add], "bos_token": "<s>"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_writes_what_it_writes_in_transformers(tokenizer, family, options):
    for chat in CHATS:
        how = {"chat_template": TEMPLATES[family], "add_generation_prompt": True, **options}
        try:
            expected = tokenizer.apply_chat_template(chat, tokenize=False, **how)
        except Exception as error:  # a template refuses a conversation
            with pytest.raises(ValueError, match="does not fit the model's chat template") as info:
                write_chats(tokenizer, [chat], how)
            assert str(error) in str(info.value)
        else:
            assert write_chats(tokenizer, [chat], how) == [expected]


@pytest.mark.parametrize("family", ["chatml", "headers"])
@pytest.mark.parametrize("text", ["an answer", " blank \n", "é"])
def test_a_last_message_is_left_open_as_transformers_does(tokenizer, family, text):
    chat = [USER, {"role": "assistant", "content": text}]
    how = {"chat_template": TEMPLATES[family], "continue_final_message": True}
    how["add_generation_prompt"] = False
    expected = tokenizer.apply_chat_template(chat, tokenize=False, **how)
    assert write_chats(tokenizer, [chat], how) == [expected]
    assert expected.endswith(text.strip() if family == "headers" else text)
    with pytest.raises(ValueError, match="set one of them to False"):
        write_chats(tokenizer, [chat], how | {"add_generation_prompt": True})


def test_objects_reach_a_template_as_plain_data(tokenizer):
    class Odd(str):
        __slots__ = ()

        def upper(self):
            raise AssertionError("a template called it")

    template = {"chat_template": "{{ messages[0].content.upper() }} {{ messages[0].image.save }}"}
    chat = [{"role": Odd("user"), "content": Odd("a"), "image": threading.Lock()}]
    assert write_chats(tokenizer, [chat], template) == ["A "]


# One operation each, which would take minutes or all memory.
BIG = "{% set a = 'a' * 10**6 %}"
SHARED = "{% set c = [[[0] * 1000] * 1000] * 1000 %}"  # few objects, 10^9 to whoever reads all
TUPLES = "{% set t = (1, 1) %}" + "{% set t = (t, t) %}" * 40
OPERATIONS = [
    "9**(9**9)",
    "'a' * 10**10",
    "10**10 * [0]",
    "'%1000000000d' % 5",
    "'%*d' % (1000000000, 5)",
    "'%.1000000000f' % 5",
    "'%(a)1000000000d' % {'a': 5}",
    "'%1000000000d' | format(5)",
    "'{:1000000000}'.format('a')",
    "'{:{}}'.format('a', 1000000000)",
    "'{a:1000000000}'.format_map({'a': 'b'})",
    "('{:1000000000}' | safe).format('a')",
    *[f"'abc'.{name}(10**10)" for name in ("center", "ljust", "rjust", "zfill")],
    "('abc' | safe).rjust(10**10)",
    "'abc'['center'](10**10)",
    "'a' | center(10**10)",
    "['a'] | map('center', 10**10) | list",
    "'\t'.expandtabs(10**10)",
    "('a\n' * 10**4) | indent(10**9)",
    "('a\n' * 10**4) | indent('a' * 10**5)",
    BIG + "a.replace('a', a)",
    BIG + "a | replace('a', a)",
    BIG + "a | replace(new=a, old='a')",
    BIG + "a.join(a)",
    BIG + "a | join(a)",
    BIG + "range(999) | map('string') | join(a)",
    BIG + "a.join(range(999) | map('string'))",
    BIG + "a.translate({97: a})",
    BIG + "a.strip('b' * 10**6 ~ 'a')",
    BIG + "a | trim('b' * 10**6 ~ 'a')",
    BIG + "a.rfind('b' ~ 'a' * 500000)",
    BIG + "a.encode('punycode')",
    BIG + "a in [a ~ 'b'] * 10**6",
    BIG + "([a] * 10**4) | sum(start='')",
    BIG + "'%s' * 100000 % ((a,) * 100000)",
    BIG + "'%(a)s' * 1000 % {'a': a}",
    "('a b ' * 10**7).split()",
    "('9' * 10**6) | int",
    "5 | round(-1000000000)",
    "5.5 | round(1000000000, 'floor')",
    "(5).to_bytes(10**10, 'big')",
    "[1] | tojson(indent=1000000000)",
    "[1] | tojson(indent='a' * 10**5)",
    "([-10**12] | map('charge') | list) ~ 'a' * 10**9",
    "(('nan' | float) | charge) ~ 'a' * 10**9",
    "[[0] * 9999] | tojson(separators=['a' * 10**5, 'b'])",
    "([[0] * 1000] * 10000) | sum(start=[])",
    "([[[0] * 1000]] * 10000) | sum(start=[], attribute=0)",
    "[1] | batch(10**9, 0) | list",
    "range(99999) | slice(10**9) | list",
    "'a' | wordwrap(1, wrapstring='b' * 10**9)",
    SHARED + "c",
    SHARED + "c ~ 'a'",
    SHARED + "c == [[[0] * 1000] * 1000] * 1000",
    SHARED + "c | tojson",
    SHARED + "c | string",
    SHARED + "'%s' % (c,)",
    SHARED + "'{!r}'.format(c)",
    SHARED + "[c, [[[0] * 1000] * 1000] * 1000] | unique | list",
    TUPLES + "{t: 1}",
    TUPLES + "{}[t]",
    TUPLES + "{}.get(t)",
]
LOOPS = [
    "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "{% for i in range(99999) %}{% for i in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for x in range(99) recursive %}{{ loop(range(99)) if loop.depth < 50 }}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% else %}aa{% endif %}{% endmacro %}"
    "{{ m(40) }}",
    *[
        "{% set ns = namespace(a=" + start + ") %}{% for i in range(100) %}{% set ns.a = "
        f"{step} %}}{{% endfor %}}{{{{ ns.a | string | length }}}}"
        for start, step in [
            ("'a'", "ns.a ~ ns.a"),
            ("'a'", "ns.a + ns.a"),
            ("9", "ns.a * ns.a"),
            ("[1]", "ns.a + ns.a"),
            ("[1]", "[ns.a, ns.a]"),
            ("{}", "{'a': ns.a, 'b': ns.a}"),
        ]
    ],
    "{% set ns = namespace(a='a') %}{% for i in range(100) %}"
    "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}{{ ns.a | length }}",
    "{% for i in range(99999) %}" + "x" * 100000 + "{% endfor %}",
    "{% filter center(10**10) %}a{% endfilter %}",
    "{% autoescape ('a' | center(10**10)) %}{{ 'a' * 10**10 }}{% endautoescape %}",
    "{{ ([range(99999)] * 99999) | map('list') | map('length') | list }}",
]


def as_template(operation: str) -> str:
    sets, end, expression = operation.rpartition("%}")
    return f"{sets}{end}{{{{ {expression} }}}}"


@pytest.mark.parametrize("template", [as_template(one) for one in OPERATIONS])
def test_no_single_operation_holds_the_interpreter(monkeypatch, template):
    monkeypatch.setattr(sandbox, "WORK", 2**23)
    tracemalloc.start()
    try:
        with pytest.raises(TooMuchWorkError):
            render(template, {"messages": []})
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("template", LOOPS)
def test_no_loop_goes_on_for_ever(monkeypatch, template):
    """At the whole allowance it would go on for half a minute."""
    monkeypatch.setattr(sandbox, "WORK", 2**20)
    with pytest.raises(TooMuchWorkError):
        render(template, {"messages": []})


def test_a_template_may_do_more_for_a_longer_conversation(monkeypatch):
    monkeypatch.setattr(sandbox, "WORK", 2**16)
    template = "{% for m in messages %}{% for n in messages %}{{ n.a }}{% endfor %}{% endfor %}"
    template += "{% for m in messages[:1] %}{{ m.a.split('x') | join('y') | upper }}{% endfor %}"
    assert len(render(template, {"messages": [{"a": "x" * 10**6}]})) == 2 * 10**6


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_conversation_of_thousands_of_messages_is_written(tokenizer, family):
    chat = [SYSTEM, *[USER, ANSWER] * 1000, USER]
    how = {"chat_template": TEMPLATES[family], "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template(chat, tokenize=False, **how)
    assert write_chats(tokenizer, [chat], how) == [expected]


ENDLESS = LOOPS[0]
CHAT = [{"role": "user", "content": "hello"}]


def test_a_conversation_with_which_a_template_does_not_end_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr(sandbox, "WORK", 2**16)
    template = "{% if messages[0].hangs %}" + ENDLESS + "{% endif %}a"
    hangs = [CHAT[0] | {"hangs": True}]
    with pytest.raises(ValueError, match=r"messages\[1\] keeps .* busy without end.*Shorten"):
        write_chats(tokenizer, [CHAT, hangs, CHAT], {"chat_template": template})
    assert write_chats(tokenizer, [CHAT], {"chat_template": template}) == ["a"]


def test_threads_that_share_a_template_have_work_of_their_own(tokenizer, monkeypatch):
    monkeypatch.setattr(sandbox, "WORK", 2**18)
    template = {"chat_template": "{% for i in range(messages[0].n) %}{{ i }}{% endfor %}"}
    long, short = [[CHAT[0] | {"n": n}] for n in (10**5, 10)]
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(write_chats, tokenizer, [chat] * 3, template)
            for chat in (long, short, short, long, short, short)
        ]
    for call, fails in zip(calls, (True, False, False, True, False, False)):
        if fails:
            assert "busy without end" in str(call.exception())
        else:
            assert call.result() == ["0123456789"] * 3


def test_ctrl_c_ends_a_chat_template_and_is_passed_on(tokenizer):
    with pytest.raises(KeyboardInterrupt), alarms(signal.default_int_handler, 0.3):
        write_chats(tokenizer, [CHAT], {"chat_template": ENDLESS})


# Jobs.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


def lines_of(template: str) -> list[dict]:
    own = {"messages": CHAT, "chat_template_kwargs": {"chat_template": template}, "max_tokens": 2}
    return [{"messages": CHAT, "max_tokens": 2}, own]


TRUST = "--trust-request-chat-template"


def test_a_line_brings_a_chat_template_only_where_the_owner_allows_it(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", lines_of("in"))
    argv = arguments(source, tmp_path / "out.jsonl", model)
    assert main(argv) == 0
    good, refused = read_lines(tmp_path / "out.jsonl")
    assert "error" not in good
    assert "chat_template, which is a program" in refused["error"] and TRUST in refused["error"]
    assert main([*arguments(source, tmp_path / "trusted.jsonl", model), TRUST]) == 0
    assert read_lines(tmp_path / "trusted.jsonl")[1]["num_prompt_tokens"] == 1
    # What the owner gives for all lines needs no flag, and is no line's.
    plain = write_lines(tmp_path / "plain.jsonl", lines_of("in")[:1])
    argv = arguments(plain, tmp_path / "owner.jsonl", model)
    assert main([*argv, "--chat-template-kwargs", json.dumps({"chat_template": "in"})]) == 0
    assert read_lines(tmp_path / "owner.jsonl")[0]["num_prompt_tokens"] == 1


def test_a_batch_of_openai_brings_no_chat_template_either():
    format = NativeFormat(Defaults(SamplingParams(), 0, {"enable_thinking": False}))
    fields = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": True}}
    assert format.parse(1, fields).template_options == {"enable_thinking": True}
    with pytest.raises(ValueError, match="which is a program"):
        format.parse(1, {"messages": CHAT, "chat_template_kwargs": {"chat_template": "a"}})


def test_a_job_that_goes_on_is_not_mixed_with_one_that_trusts_its_lines(model, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", lines_of("in"))
    argv = arguments(source, tmp_path / "out.jsonl", model)
    assert main(argv) == 0
    assert main([*argv, TRUST]) == 2
    assert f"{TRUST} was None and is True" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_job_inside_a_template_and_the_job_goes_on(
    model, tmp_path, monkeypatch, number
):
    source = write_lines(tmp_path / "in.jsonl", lines_of(f"{ENDLESS}{{# {number} #}}"))
    argv = [*arguments(source, tmp_path / "out.jsonl", model), TRUST]
    charge, charges = BoundedEnvironment.charge, []

    def charge_and_signal(self, work):
        charges.append(work)
        if len(charges) == 1000:
            os.kill(os.getpid(), number)
        return charge(self, work)

    monkeypatch.setattr(BoundedEnvironment, "charge", charge_and_signal)
    assert main(argv) == 128 + number
    assert len(charges) < 1100
    monkeypatch.setattr(sandbox, "WORK", 2**16)
    monkeypatch.setattr(BoundedEnvironment, "charge", charge)
    assert main(argv) == 0
    good, failed = read_lines(tmp_path / "out.jsonl")
    assert "error" not in good and "busy without end" in failed["error"]
