"""Gemma 4's chat templates as transformers renders them: mlex-models/tests/data/gemma4-templates.json.

`python tools/make_gemma4_template_golden.py FOLDER`, where FOLDER is `trl/chat_templates` out of the wheel of
PyPI's `trl` 1.16.0 (`pip download --no-deps trl==1.16.0`, then unzip): it has the templates that Google has
published with the models, unchanged and under Apache-2.0. Two are kept: that of the release, which most
converted checkpoints have, and the latest one.
"""

import sys
from pathlib import Path

from goldens import ROOT, save_json
from make_template_golden import SYSTEM, TOOL_TURNS, TOOLS, TURNS, TWO_USERS, USER, row

TEMPLATES = {"released": "gemma4_v2.jinja", "latest": "gemma4_v5.jinja"}

NESTED = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Books a table",
            "parameters": {
                "type": "object",
                "properties": {
                    "when": {"type": "string", "description": "ISO date"},
                    "kind": {"type": "string", "enum": ["in", "out"]},
                    "seats": {"type": "integer", "nullable": True},
                    "rate": {"type": "number", "description": "0 to 1", "nullable": True},
                    "guests": {
                        "type": "array",
                        "description": "Who comes",
                        "items": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                            "required": ["name"],
                        },
                    },
                    "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
                    "mixed": {"type": "array", "items": {"type": ["string", "null"]}},
                    "place": {
                        "type": "object",
                        "description": "Where",
                        "properties": {"city": {"type": "string"}, "Zip": {"type": "string"}},
                        "required": ["city"],
                    },
                    "free": {"type": "object"},
                    "either": {"type": ["string", "null"]},
                },
                "required": ["when", "guests"],
            },
            "response": {"type": "object", "description": "The booking"},
        },
    }
]


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def assistant(*calls, **more):
    return {"role": "assistant", "content": "", **({"tool_calls": list(calls)} if calls else {}), **more}


MANY = {"z": [1, 2.5, -3, 1e20, 1e-7], "a": {"y": None, "B": True, "b": "x<|\"|>y"}, "e": [], "f": {}, "s": "\u00e9\n\u4f60"}
BY_ID = [
    {"role": "user", "content": "Both?"},
    assistant(call("get_weather", {"city": "K\u00f6ln"}, id="c1"), call("now", {}, id="c2"), content="One moment."),
    {"role": "tool", "tool_call_id": "c2", "content": "09:08"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "21"}, {"type": "text", "text": ".5"}]},
]
THOUGHTS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<|channel>thought\neasy\n<channel|>2 "},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "also easy", "content": "4"},
]
REASONED_CALL = [
    USER[0],
    {**assistant(call("now", {})), "reasoning": "I need the time."},
    {"role": "tool", "name": "now", "content": '{"hour": 9}'},
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": " Look closely. "}]},
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": " What is this? "},
            {"type": "audio"},
            {"type": "video"},
            {"type": "image_url", "image_url": {"url": "x"}},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "<|channel>thought\nhm<channel|>A cat."}]},
]


def cases(template):
    for name, messages, kwargs in (
        ("user", USER, {}),
        ("user_thinking", USER, {"enable_thinking": True}),
        ("user_no_thinking", USER, {"enable_thinking": False}),
        ("user_no_prompt", USER, {"add_generation_prompt": False}),
        ("system", SYSTEM, {}),
        ("system_thinking", SYSTEM, {"enable_thinking": True}),
        ("developer", [{"role": "developer", "content": " Be brief. "}, *USER], {}),
        ("turns", TURNS, {}),
        ("turns_no_prompt", TURNS, {"add_generation_prompt": False}),
        ("two_users", TWO_USERS, {}),
        ("thoughts", THOUGHTS, {"add_generation_prompt": False}),
        ("thoughts_history", [*THOUGHTS, {"role": "user", "content": "3+3?"}], {"enable_thinking": True}),
        ("thoughts_kept", [*THOUGHTS, *REASONED_CALL], {"preserve_thinking": True}),
        ("tools", USER, {"tools": TOOLS}),
        ("tools_system", SYSTEM, {"tools": TOOLS}),
        ("tools_thinking", SYSTEM, {"tools": TOOLS, "enable_thinking": True}),
        ("tools_nested", USER, {"tools": NESTED}),
        ("tool_turns", TOOL_TURNS, {"tools": TOOLS}),
        ("tool_calls", TOOL_TURNS[:2], {"tools": TOOLS}),
        ("tool_results", TOOL_TURNS[:4], {"tools": TOOLS}),
        ("tool_results_thinking", TOOL_TURNS[:4], {"tools": TOOLS, "enable_thinking": True}),
        ("tool_results_by_id", BY_ID, {"tools": TOOLS}),
        ("tool_results_answered", [*BY_ID, {"role": "assistant", "content": "21.5."}], {"add_generation_prompt": False}),
        ("tool_arguments", [USER[0], assistant(call("f", MANY))], {"add_generation_prompt": False}),
        ("tool_arguments_none", [USER[0], assistant(call("f", None))], {}),
        ("tool_arguments_text", [USER[0], assistant(call("f", '{"a": 1}'))], {}),
        ("tool_reasoned", REASONED_CALL, {}),
        (
            "tool_responses_inside",
            [USER[0], assistant(call("f", {}), tool_responses=[{"name": "f", "response": MANY}, {"response": "x"}])],
            {},
        ),
        ("continued", [*USER, {"role": "assistant", "content": "Par"}, {"role": "assistant", "content": "is"}], {}),
        ("parts", PARTS, {}),
    ):
        case = row(name, template, messages, "<bos>", "<eos>", **kwargs)
        del case["template"]
        yield case


def main(folder):
    out = {"license": "Apache-2.0 (Google)"}
    for name, file in TEMPLATES.items():
        template = (Path(folder) / file).read_text()
        rows = list(cases(template))
        out[name] = {"template": template, "cases": rows}
        print(f"{name}: {len(rows)} cases")
        for case in rows:
            if "error" in case:
                print(f"  {case['name']}: {case['error_kind']}: {case['error']}")
    save_json(ROOT / "mlex-models/tests/data/gemma4-templates.json", out)


if __name__ == "__main__":
    main(*sys.argv[1:])
