"""Chat templates as transformers renders them: mlex-models/tests/data/{templates,qwen3-template}.json.

`python tools/make_template_golden.py SmolLM2-135M-Instruct.Q4_1.gguf qwen3/tokenizer_config.json`. The
two arguments give SmolLM2's and Qwen3's own templates (both Apache-2.0); the other templates are
written here, in the forms that checkpoints use. `strftime_now` sees the fixed time in NOW.
"""

import json
import sys
from datetime import datetime
from pathlib import Path

from gguf import GGUFReader
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from gguf_tokenizer import read_fields
from goldens import ROOT, save_json, save_json_lines

DATA = ROOT / "mlex-models/tests/data"
NOW = datetime(2024, 7, 5, 9, 8, 7)

USER = [{"role": "user", "content": "What is the capital of France?"}]
SYSTEM = [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": ' Hi <there> & "you"\n'}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One"},
    {"role": "assistant", "content": "Two"},
    {"role": "user", "content": "Three \u00e9\u4f60\U0001f600"},
]
TWO_USERS = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a <city> & its "area" (\u00b0C)',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1, "maximum": 1e20}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
TOOL_TURNS = [
    {"role": "user", "content": "Weather in K\u00f6ln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "arguments": {"city": "K\u00f6ln", "days": 2, "units": None, "fine": True},
                },
            },
            {"type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    },
    {"role": "tool", "name": "get_weather", "content": '{"temp": 21.5}'},
    {"role": "tool", "name": "now", "content": "09:08"},
    {"role": "assistant", "content": "21.5 degrees."},
    {"role": "user", "content": "Thanks"},
]
THINKING = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "also easy", "content": "4"},
]

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

MEDIA = """{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}\
{% for item in message.content %}{% if item.type == 'image' or 'image_url' in item %}<|image_pad|>{% elif 'text' in item %}{{ item.text }}{% endif %}\
{% endfor %}{% endif %}</{{ message.role }}>
{% endfor %}"""

CALENDAR = "{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%A, %B %d, %Y') }}|{{ strftime_now('%H:%M:%S') }}|{{ strftime_now('%j %y %I %p %%') }}"

# (name, template): one feature of Jinja as Python has it each, rendered with the conversation TURNS.
FEATURES = [
    (
        "print_literals",
        "{{ true }} {{ false }} {{ none }} {{ 1 }} {{ 1.0 }} {{ 2.5 }} {{ -3 }} {{ 'x' }} {{ True }} {{ None }}",
    ),
    (
        "print_containers",
        "{{ [1, 'a', none, true, 1.5] }} {{ {'k': 'v', 'n': [1]} }} {{ (1, 2) }} {{ ['it\\'s', 'say \"x\"'] }}",
    ),
    (
        "arithmetic",
        "{{ 7 // 2 }} {{ 7 / 2 }} {{ 7 % 3 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1 + 2 * 3 }} {{ 'ab' * 3 }} {{ 'a' ~ 1 ~ none }}",
    ),
    (
        "comparison",
        "{{ 1 < 2 }} {{ 'a' in 'cat' }} {{ 'x' not in ['x'] }} {{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ 1 if 0 else 2 }} {{ (1 if false) is undefined }} {{ not 0 }} {{ 0 or 'x' }} {{ 1 and 'y' }}",
    ),
    (
        "undefined",
        "[{{ missing }}] [{{ messages[0].missing }}] [{{ missing is defined }}] [{{ missing | default('d') }}] [{{ '' | default('d', true) }}] {% if missing %}a{% else %}b{% endif %}",
    ),
    (
        "string_methods",
        "{{ ' a '.strip() }}|{{ 'xax'.strip('x') }}|{{ '  a'.lstrip() }}|{{ 'a\\n\\n'.rstrip('\\n') }}|{{ 'a,b,c'.split(',') }}|{{ 'a b  c'.split() }}|{{ 'a</t>b</t>c'.split('</t>')[-1] }}|{{ 'a.b.c'.split('.', 1) }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith('bc') }}|{{ 'aXbX'.replace('X', '-') }}|{{ 'aXbX'.replace('X', '-', 1) }}|{{ 'Ab'.upper() }}{{ 'Ab'.lower() }}|{{ 'ab cd'.title() }}|{{ 'ab cd'.capitalize() }}|{{ 'abc'.find('c') }}|{{ 'a-a'.count('a') }}|{{ ', '.join(['a', 'b']) }}|{{ '12'.isdigit() }}|{{ 'a\\nb\\n'.splitlines() }}",
    ),
    (
        "string_slices",
        "{{ 'hello'[0] }} {{ 'hello'[-1] }} {{ 'hello'[1:3] }} {{ 'hello'[:-1] }} {{ 'hello'[::-1] }} {{ 'h\u00e9llo\U0001f600'[1:3] }} {{ 'h\u00e9llo\U0001f600' | length }}",
    ),
    (
        "list_slices",
        "{% for m in messages[::-1] %}{{ m.role }} {% endfor %}{% for m in messages[1:] %}{{ m.role }} {% endfor %}{{ messages[-1].content }} {{ messages[:2] | length }} {{ [1, 2, 3][1:] }}",
    ),
    (
        "dict_methods",
        "{% set d = {'b': 1, 'a': {'x': 2}} %}{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{{ d.keys() | list }}{{ d.values() | list }}{{ d.get('b') }}{{ d.get('z') }}{{ d.get('z', 9) }}{% for k, v in d | dictsort %}{{ k }}{% endfor %}{% for k in d %}{{ k }}{% endfor %}{{ d['a']['x'] }}{{ d.a.x }}{{ 'b' in d }}{{ d | length }}",
    ),
    ("dict_items_filter", "{% for k, v in {'b': 1, 'a': 2} | items %}{{ k }}{{ v }}{% endfor %}"),
    (
        "loop_variables",
        "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}\n{% endfor %}",
    ),
    (
        "loop_filter_else",
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}{% for m in [] %}x{% else %}empty{% endfor %}",
    ),
    (
        "loop_controls",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    ),
    (
        "nested_loops",
        "{% for a in [1, 2] %}{% set outer = loop %}{% for b in range(a) %}{{ outer.index }}{{ loop.index }} {% endfor %}{% endfor %}{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}",
    ),
    (
        "namespace",
        "{% set ns = namespace(found=false, n=0, text='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.found = true %}{% set ns.n = ns.n + 1 %}{% set ns.text = ns.text ~ m.content[0] %}{% endif %}{% endfor %}{{ ns.found }}{{ ns.n }}{{ ns.text }}",
    ),
    (
        "loop_scope",
        "{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}{% if true %}{% set x = 3 %}{% endif %}{{ x }}",
    ),
    (
        "macros",
        "{% macro show(m, tag='t', end=none) %}<{{ tag }}>{{ m.content }}{% if end is not none %}{{ end }}{% endif %}{% endmacro %}{{ show(messages[1]) }}{{ show(messages[2], tag='u', end='!') }}",
    ),
    (
        "macro_strip",
        "{%- macro pair(k, v) -%}\n  {{- k -}} : {{- v -}}\n{%- endmacro -%}\n{{ pair('a', 1) }}\n{{ pair('b', 2) }}",
    ),
    (
        "block_set",
        "{% set text %}a {{ messages[0].role }} b{% endset %}[{{ text }}]{% set shout | upper %}abc{% endset %}{{ shout }}",
    ),
    (
        "call_block",
        "{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}{% call wrap('b') %}x{% endcall %}",
    ),
    ("filter_block", "{% filter upper %}abc {{ messages[0].role }}{% endfilter %}"),
    (
        "filters",
        "{{ [3, 1, 2] | sort }} {{ [1, 2] | sum }} {{ [1, 2] | first }}{{ [1, 2] | last }} {{ ['a', 'b'] | join('-') }} {{ messages | map(attribute='role') | join(',') }} {{ messages | map(attribute='role') | unique | list }} {{ 'a b' | replace(' ', '_') }} {{ 'x' | upper }} {{ 'ABC' | lower }} {{ 'ab cd' | title }} {{ 'ab' | capitalize }} {{ '3' | int + 1 }} {{ '2.5' | float }} {{ 5 | string ~ 'x' }} {{ 'abc' | list }} {{ [1, 2, 3] | reverse | list }} {{ -3 | abs }} {{ [1, 5, 2] | max }} {{ 'abc' | length }} {{ [1,2,3] | count }} {{ 2.567 | round(1) }} {{ ' x ' | trim }} {{ 'xxaxx' | trim('x') }}",
    ),
    (
        "select_filters",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }} {{ messages | rejectattr('role', 'in', ['user', 'system']) | list | length }} {{ [1, 2, 3, 4] | select('even') | list }} {{ [0, 1, '', 'a'] | reject | list | length }} {{ messages | selectattr('tool_calls', 'defined') | list | length }} {{ messages | groupby('role') | length }}",
    ),
    ("indent_filter", "{{ 'a\\nb\\n\\nc' | indent(2) }}|{{ 'a\\nb' | indent(4, true) }}"),
    (
        "tests",
        "{{ 1 is number }} {{ 'a' is string }} {{ [1] is iterable }} {{ 'a' is iterable }} {{ {'a': 1} is mapping }} {{ [1] is sequence }} {{ none is none }} {{ 3 is odd }} {{ 4 is divisibleby 2 }} {{ true is boolean }} {{ 1 is boolean }} {{ true is true }} {{ 1 is integer }} {{ 1.5 is float }} {{ 'a' is in ['a'] }} {{ 1 is eq 1 }} {{ 'a' is not string }} {{ 'ab' is lower }}",
    ),
    (
        "tojson",
        "{{ {'b': [1, 2.0, 1e-5, 1e20, 0.1, none, true], 'a': '<&>\\'\"/\\\\ \\n\\t \u00e9 \u4f60 \U0001f600 \x7f \x01'} | tojson }}",
    ),
    ("tojson_indent", "{{ {'b': [1, {'c': []}], 'a': {}, 'd': ['x']} | tojson(indent=2) }}"),
    (
        "tojson_options",
        "{{ {'b': 1, 'a': '\u00e9\U0001f600'} | tojson(sort_keys=true) }} {{ '\u00e9\U0001f600' | tojson(ensure_ascii=true) }} {{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}",
    ),
    ("tojson_messages", "{{ messages | tojson }}"),
    (
        "whitespace_control",
        "  {%- if true -%}  a  {%- endif -%}  b\n    {% if true %}\n  c\n    {% endif %}\n  {# comment #}\nd {{- ' e ' -}} f\n\n{%+ if true %} g {%+ endif %}\n",
    ),
    ("trailing_newline", "a\n"),
    ("trailing_newlines", "a\n\n\n"),
    ("lines_of_blocks", "{% if true %}\n{% for i in range(2) %}\n{{ i }}\n{% endfor %}\n{% endif %}\nend\n"),
    ("indented_comment", "a\n   {# note #}   \n   b\n  {#- strip -#}  \nc"),
    ("crlf", "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc"),
    (
        "generation_block",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    ),
    ("raw_block", "{% raw %}{{ not rendered }} {% if %}{% endraw %}"),
    ("string_escapes", "{{ 'a\\tb\\\\n\\u00e9\\x41' }} {{ \"it's\" }} {{ 'two' 'parts' }}"),
    (
        "inline_conditions",
        "{{ 'a' if messages | length > 3 else 'b' }} {{ ('x' if false else 'y') ~ 'z' }} {{ messages[0].content if messages[0].role == 'system' else '' }}",
    ),
    ("range_and_dict", "{{ range(3) | list }} {{ range(1, 6, 2) | list }} {{ dict(a=1, b='c') }} {{ dict(a=1).a }}"),
    ("concatenation", "{{ 'a' + 'b' + messages[0]['role'] }} {{ [1] + [2] }} {{ 'n: ' ~ 3 }}"),
    ("set_tuple", "{% set a, b = 1, 'x' %}{{ a }}{{ b }}"),
    ("escaping_is_off", "{{ '<b>&\"' }} {{ messages[0].content }} {{ '<b>' | e }} {{ '<b>' | safe }}"),
    ("bos_and_eos", "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}"),
    (
        "tools_and_documents_are_none",
        "{{ tools is none }} {{ tools is defined }} {{ documents is none }} {{ add_generation_prompt }}",
    ),
    (
        "logic_precedence",
        "{{ not true or true }} {{ not (true or true) }} {{ 1 in [1] and 2 not in [1] }} {{ 'a' ~ 'b' == 'ab' }} {{ 1 + 1 == 2 and 3 > 2 > 1 }}",
    ),
    ("none_content", "{{ messages[0].tool_calls }}[{{ messages[0].get('tool_calls') }}]"),
    ("comment_with_tags", "a{# {{ x }} {% if %} #}b"),
    ("do_not_copy", "{% set m = messages[1] %}{% set c = m.content %}{{ c }}{{ m['content'] is string }}"),
]

ERRORS = [
    ("error_raise", "{{ raise_exception('No \"good\" reason: ' ~ messages[0].role) }}"),
    ("error_attribute_of_undefined", "{{ missing.field }}"),
    ("error_undefined_method", "{{ messages[0].content.no_such_method() }}"),
    ("error_add_types", "{{ 'a' + 1 }}"),
    ("error_syntax", "{% if %}{{ x }}"),
    ("error_unclosed", "{% for m in messages %}{{ m.role }}"),
    ("error_unknown_filter", "{{ 'a' | no_such_filter }}"),
    ("error_unknown_tag", "{% nosuchtag %}"),
    ("error_unclosed_print", "{{ messages"),
]


def render(template, messages, bos_token, eos_token, tools=None, add_generation_prompt=True, **kwargs):
    """What transformers' apply_chat_template gives, or its error, as the fields of a row."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={}, merges=[])), bos_token=bos_token, eos_token=eos_token
    )
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
    except Exception as error:
        return {"error": str(error), "error_kind": type(error).__name__}
    return {"expected": text}


def row(name, template, messages, bos_token="<s>", eos_token="</s>", tools=None, add_generation_prompt=True, **kwargs):
    return {
        "name": name,
        "template": template,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "messages": messages,
        "tools": tools,
        "kwargs": kwargs,
        "add_generation_prompt": add_generation_prompt,
        "now": NOW.isoformat(),
        **render(template, messages, bos_token, eos_token, tools, add_generation_prompt, **kwargs),
    }


def classic_rows(smollm2):
    media = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A cat."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "x"}},
                {"type": "text", "text": "b"},
            ],
        },
    ]
    yield row("smollm2_user", smollm2, USER, "<|im_start|>", "<|im_end|>")
    yield row("smollm2_no_prompt", smollm2, USER, "<|im_start|>", "<|im_end|>", add_generation_prompt=False)
    yield row("smollm2_system", smollm2, SYSTEM, "<|im_start|>", "<|im_end|>")
    yield row("smollm2_turns", smollm2, TURNS, "<|im_start|>", "<|im_end|>")
    yield row("chatml_lines", CHATML, TURNS)
    yield row("chatml_lines_no_prompt", CHATML, TURNS, add_generation_prompt=False)
    for name, messages in (("user", USER), ("system", SYSTEM), ("turns", TURNS)):
        yield row(f"llama3_{name}", LLAMA3, messages, "<|begin_of_text|>", "<|eot_id|>")
        yield row(f"mistral_{name}", MISTRAL, messages)
        yield row(f"gemma_{name}", GEMMA, messages, "<bos>", "<eos>")
    one_call = [{**TOOL_TURNS[1], "tool_calls": TOOL_TURNS[1]["tool_calls"][:1]}]
    yield row("llama3_date", LLAMA3, USER, "<|begin_of_text|>", "<|eot_id|>", date_string="26 Jul 2024")
    yield row(
        "llama3_tools", LLAMA3, TOOL_TURNS[:1] + one_call + TOOL_TURNS[2:3], "<|begin_of_text|>", "<|eot_id|>", TOOLS
    )
    yield row("llama3_two_calls", LLAMA3, TOOL_TURNS, "<|begin_of_text|>", "<|eot_id|>", TOOLS)
    yield row("mistral_tools", MISTRAL, TURNS, tools=TOOLS)
    yield row("mistral_two_users", MISTRAL, TWO_USERS)
    yield row("gemma_two_users", GEMMA, TWO_USERS)
    yield row("gemma_alternating", GEMMA, TURNS[1:], "<bos>", "<eos>")
    yield row("media_parts", MEDIA, media)
    yield row("calendar", CALENDAR, USER)
    for name, template in FEATURES:
        yield row(name, template, TURNS, add_generation_prompt=False)
    for name, template in ERRORS:
        yield row(name, template, TURNS)


def qwen3_cases(template):
    for name, messages, kwargs in (
        ("user", USER, {}),
        ("user_thinking", USER, {"enable_thinking": True}),
        ("user_no_thinking", USER, {"enable_thinking": False}),
        ("user_no_prompt", USER, {"add_generation_prompt": False}),
        ("system", SYSTEM, {}),
        ("turns", TURNS, {}),
        ("thinking_turns", THINKING, {"add_generation_prompt": False}),
        ("thinking_history", [*THINKING, {"role": "user", "content": "3+3?"}], {"enable_thinking": False}),
        ("tools", USER, {"tools": TOOLS}),
        ("tools_system", SYSTEM, {"tools": TOOLS}),
        ("tool_turns", TOOL_TURNS, {"tools": TOOLS}),
        ("tool_results", TOOL_TURNS[:4], {"tools": TOOLS}),
        (
            "tool_call_with_text",
            [TOOL_TURNS[0], {**TOOL_TURNS[1], "content": "Let me look."}],
            {"tools": TOOLS, "add_generation_prompt": False},
        ),
        (
            "tool_call_string_arguments",
            [
                TOOL_TURNS[0],
                {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": '{"a": 1}'}]},
            ],
            {"add_generation_prompt": False},
        ),
        ("late_system", [*USER, {"role": "system", "content": "Shout."}], {}),
    ):
        case = row(name, template, messages, None, "<|im_end|>", **kwargs)
        del case["template"]
        yield case


def main(gguf, qwen3_config):
    class FixedTime:
        now = staticmethod(lambda: NOW)

    chat_template_utils.datetime = FixedTime
    smollm2 = read_fields(GGUFReader(gguf))["tokenizer.chat_template"]
    rows = list(classic_rows(smollm2))
    save_json_lines(DATA / "templates.json", rows)
    template = json.loads(Path(qwen3_config).read_text())["chat_template"]
    cases = list(qwen3_cases(template))
    save_json(DATA / "qwen3-template.json", {"license": "Apache-2.0 (Qwen3)", "template": template, "cases": cases})
    print(f"{len(rows)} template rows, {len(cases)} Qwen3 cases")
    for case in rows + cases:
        if ("error" in case) and "error" not in case["name"]:
            print(f"  {case['name']}: {case['error_kind']}: {case['error']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
