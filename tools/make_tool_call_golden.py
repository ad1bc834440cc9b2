"""Expected tool calls: mlex-models/tests/data/tool-calls.json.

A row is an answer of a model, markers included, and the calls in it. Where mlx-lm has a parser
for the format (`reference` names it), `calls` is what it gives for the text between the markers;
`null` where it raises. Formats that mlx-lm does not know, and answers that its parser reads
otherwise than their format means (`note` says why), were written from calls: `calls` are those.

    python tools/make_tool_call_golden.py [PATH OF mlx_lm/tool_parsers]
"""

import ast
import importlib.util
import json
import sys
from pathlib import Path

OUT = Path(__file__).parent.parent / "mlex-models/tests/data/tool-calls.json"


def parsers():
    """mlx-lm's parsers by name, each loaded alone: they need no MLX."""
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        folder = Path(importlib.util.find_spec("mlx_lm").origin).parent / "tool_parsers"
    found = {}
    for name in ("json_tools", "qwen3_coder", "gemma4", "mistral", "pythonic"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[name] = module
    return found


def tool(name, **properties):
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("multiply", a={"type": "number"}, b={"type": "number"}),
    tool("get_current_temperature", location={"type": "string"}, unit={"type": "string"}),
    tool(
        "search",
        filters={"type": "object"},
        tags={"type": "array"},
        limit={"type": "integer"},
        exact={"type": "boolean"},
        any={"type": ["string", "null"]},
        free={},
        untyped={"description": "no type"},
    ),
    tool("write_file", path={"type": "string"}, content={"type": "string"}),
    tool("now"),
]

CODE = 'fn main() {\n    println!("{}", 1 < 2 && true);\n}\n'

# Format, reference, what stands between the markers.
REFERENCE = [
    ("json", "json_tools", '{"name": "multiply", "arguments": {"a": 12234585, "b": 48838483920}}'),
    ("json", "json_tools", '\n{"name": "get_current_temperature", "arguments": {"location": "London"}}\n'),
    ("json", "json_tools", '\n{"arguments": {"location": "S\\u00e3o \\"Paulo\\""}, "name": "get_current_temperature"}\n'),
    ("json", "json_tools", json.dumps({"name": "write_file", "arguments": {"path": "a.rs", "content": CODE}})),
    ("json", "json_tools", '{"name":"search","arguments":{"filters":{"a":[1,{"b":null}],"}":"{"},"tags":[],"limit":-1.5e3}}'),
    ("json", "json_tools", '{"name": "now", "arguments": {}}'),
    ("json", "json_tools", '{"name": "now", "arguments": {}'),
    ("json", "json_tools", "multiply(a=1)"),
    ("json", "json_tools", '{"name": "write_file", "arguments": {"content": "a\nb"}}'),
    ("xml", "qwen3_coder", "<function=multiply>\n<parameter=a>\n12234585\n</parameter>\n<parameter=b>\n48838483920\n</parameter>\n</function>"),
    ("xml", "qwen3_coder", "\n<function=get_current_temperature>\n<parameter=location>\nLondon\n</parameter>\n</function>\n"),
    ("xml", "qwen3_coder", "\n<function=search>\n<parameter=filters>{'category': 'books', 'in_stock': True}</parameter>\n<parameter=tags>['fiction', 'new']</parameter>\n</function>\n"),
    ("xml", "qwen3_coder", '\n<function=search>\n<parameter=filters>\n{"category": "books", "text": "a\nb"}\n</parameter>\n<parameter=tags>\n["x"]\n</parameter>\n<parameter=limit>\n3.0\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n'),
    ("xml", "qwen3_coder", "\n<function=search>\n<parameter=any>\n(1, 2)\n</parameter>\n<parameter=free>\n7\n</parameter>\n<parameter=untyped>\n7\n</parameter>\n<parameter=unknown>\n7\n</parameter>\n<parameter=tags>\nnull\n</parameter>\n</function>\n"),
    ("xml", "qwen3_coder", f"\n<function=write_file>\n<parameter=path>\na.rs\n</parameter>\n<parameter=content>\n{CODE}\n</parameter>\n</function>\n"),
    ("xml", "qwen3_coder", "\n<function=write_file>\n<parameter=path>\n 2025-06-15T10:30:00Z \n</parameter>\n<parameter=content>\n\n\n</parameter>\n</function>\n"),
    ("xml", "qwen3_coder", "\n<function=now>\n</function>\n"),
    ("xml", "qwen3_coder", "\n<function=multiply>\n<parameter=a>\none\n</parameter>\n</function>\n"),
    ("xml", "qwen3_coder", "\n<function=multiply>\n<parameter=a>\n1\n</parameter>\n"),
    ("gemma4", "gemma4", "call:multiply{a:12234585,b:48838483920}"),
    ("gemma4", "gemma4", 'call:get_current_temperature{location:<|"|>London<|"|>}'),
    ("gemma4", "gemma4", 'call:configure{settings:{enabled:true,name:<|"|>test<|"|>}}'),
    ("gemma4", "gemma4", 'call:tag{items:[<|"|>foo<|"|>,<|"|>bar<|"|>]}'),
    ("gemma4", "gemma4", 'call:search{query:<|"|>hello world<|"|>,limit:10,verbose:false}'),
    ("gemma4", "gemma4", 'call:glob{pattern:<|"|>README*.md<|"|>}call:glob{pattern:<|"|>CONTRIBUTING.md<|"|>}'),
    ("gemma4", "gemma4", 'call:search{query:<|"|>weather<|"|>,limit:5}call:configure{settings:{enabled:true,name:<|"|>test<|"|>}}'),
    ("gemma4", "gemma4", 'call:manim-video{mode:<|"|>plan<|"|>,prompt:<|"|>explain KV caching<|"|>}'),
    ("gemma4", "gemma4", 'call:skill_manage{action:<|"|>create<|"|>,content:<|"|>use a dict like {key: value}, in [your] <code> "x"\n<|"|>}'),
    ("gemma4", "gemma4", "call:now{}"),
    ("gemma4", "gemma4", 'call:deep{a:[{b:[1,2.5,-3e2],c:null}],d:{}}'),
    ("gemma4", "gemma4", "call:broken{a:<|\"|>x"),
    ("gemma4", "gemma4", "call:broken{a:x y}"),
    ("gemma4", "gemma4", "nothing"),
    ("mistral", "mistral", 'multiply[ARGS]{"a": 12234585, "b": 48838483920}'),
    ("mistral", "mistral", 'get_current_temperature[ARGS]{"location": "London }"}'),
    ("mistral", "mistral", '\nnow[ARGS] {}'),
    ("mistral", "mistral", 'now[ARGS]{"a": }'),
    ("pythonic", "pythonic", "[multiply(a=12234585, b=48838483920)]"),
    ("pythonic", "pythonic", '[get_current_temperature(location="London")]'),
    ("pythonic", "pythonic", '[get_current_temperature(location="London", unit="c")]'),
    ("pythonic", "pythonic", "[search(exact=True, limit=-3, free=None, any=word)]"),
    ("pythonic", "pythonic", "[now()]"),
    ("pythonic", "pythonic", "nothing"),
]


def render_minicpm(calls):
    def value(value):
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<![CDATA[{text}]]>" if any(c in text for c in "<&\n") else text

    return "\n".join(
        f'<function name="{call["name"]}">'
        + "".join(f'<param name="{k}">{value(v)}</param>' for k, v in call["arguments"].items())
        + "</function>"
        for call in calls
    )


def render_pythonic(calls):
    return "[" + ", ".join(
        f'{call["name"]}(' + ", ".join(f"{k}={v!r}" for k, v in call["arguments"].items()) + ")"
        for call in calls
    ) + "]"


def check_pythonic(text, calls):
    """That Python reads the same calls out of it."""
    read = [
        {"name": call.func.id, "arguments": {k.arg: ast.literal_eval(k.value) for k in call.keywords}}
        for call in ast.parse(text, mode="eval").body.elts
    ]
    assert read == calls, (read, calls)
    return text


ONE = [{"name": "multiply", "arguments": {"a": 3, "b": 2.5}}]
TWO = [
    {"name": "get_current_temperature", "arguments": {"location": "São Paulo, \"SP\"", "unit": "c"}},
    {"name": "search", "arguments": {"filters": {"a": [1, {"b": None}]}, "tags": ["x, y)", "]"], "exact": True}},
]
FILE = [{"name": "write_file", "arguments": {"path": "a.rs", "content": CODE.strip()}}]
NONE = [{"name": "now", "arguments": {}}]


def llama(calls):
    return "; ".join(json.dumps({"name": c["name"], "parameters": c["arguments"]}) for c in calls)


# Format, calls, the answer.
CONSTRUCTED = [
    *[("nemotron_h", calls, f"<TOOLCALL>{json.dumps(calls)}</TOOLCALL>") for calls in (ONE, TWO, FILE, NONE)],
    *[("minicpm5", calls, render_minicpm(calls)) for calls in (ONE, TWO, FILE, NONE)],
    *[("mistral", calls, f"[TOOL_CALLS]{json.dumps(calls)}") for calls in (ONE, TWO, FILE, NONE)],
    *[("llama3_json", calls, llama(calls)) for calls in (ONE, TWO, FILE, NONE)],
    *[("llama3_json", calls, "<|python_tag|>" + llama(calls)) for calls in (ONE, TWO)],
    *[("llama3_pythonic", calls, check_pythonic(render_pythonic(calls), calls)) for calls in (ONE, TWO, FILE, NONE)],
    *[
        ("pythonic", calls, f"<|tool_call_start|>{check_pythonic(render_pythonic(calls), calls)}<|tool_call_end|>")
        for calls in (TWO, FILE)
    ],
    (
        "mistral",
        TWO,
        "".join(f'[TOOL_CALLS]{c["name"]}[ARGS]{json.dumps(c["arguments"])}' for c in TWO),
    ),
]

NOTES = [
    (
        "pythonic",
        [{"name": "get_current_temperature", "arguments": {"location": "12", "unit": ""}}],
        '<|tool_call_start|>[get_current_temperature(location="12", unit="")]<|tool_call_end|>',
        "mlx-lm reads the texts as a number and as two quotes",
    ),
    (
        "xml",
        [{"name": "now", "arguments": {}}, {"name": "multiply", "arguments": {"a": 1}}],
        "<tool_call><function=now></function><function=multiply><parameter=a>1</parameter></function></tool_call>",
        "mlx-lm makes one call of both",
    ),
]


def main():
    modules = parsers()
    rows = []
    for name, reference, body in REFERENCE:
        module = modules[reference]
        try:
            calls = module.parse_tool_call(body, TOOLS)
        except (ValueError, json.JSONDecodeError):
            calls = None
        if isinstance(calls, dict):
            calls = [calls]
        text = module.tool_call_start + body + module.tool_call_end
        rows.append({"format": name, "text": text, "reference": reference, "calls": calls})
    for name, calls, text in CONSTRUCTED:
        rows.append({"format": name, "text": text, "calls": calls})
    for name, calls, text, note in NOTES:
        rows.append({"format": name, "text": text, "calls": calls, "note": note})
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    OUT.write_text('{"tools": ' + json.dumps(TOOLS) + ',\n"rows": [\n' + lines + "\n]}\n")
    print(f"{len(rows)} rows, {sum(row['calls'] is None for row in rows)} malformed")


if __name__ == "__main__":
    main()
