"""Token ids of tricky strings: mlex-models/tests/data/smollm2-tokens.json.

`python tools/make_token_golden.py SmolLM2-135M-Instruct.Q4_1.gguf`. Ids and decoded text come from
Hugging Face's `tokenizers`, set up as SmolLM2's own tokenizer.json is.
"""

import sys

from gguf import GGUFReader

from gguf_tokenizer import build_tokenizer, read_fields
from goldens import ROOT, save_json_lines

STRINGS = [
    "",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t",
    "\t\t",
    "\r\n",
    " \n ",
    "\n  indented",
    "   leading",
    "trailing   ",
    "Hello, world!",
    "hello world",
    " hello",
    "Hello  world",
    "Hello   world",
    "HELLO WORLD",
    "camelCaseIdentifier",
    "snake_case_name",
    "What is the capital of France?",
    "1234567890",
    "3.14159",
    "1,000,000.00",
    "v2.0.1-rc3",
    "2024-01-31T23:59:59Z",
    "0x7fff_ffff",
    "a1b2c3",
    "\u00b2 \u00bd \u2167 \u0663\u0664\u0665",
    "I'm you're it's we'll they've he'd can't",
    "I\u2019m \u2018quoted\u2019 \u201ctext\u201d",
    "IT'S DON'T",
    "caf\u00e9",
    "cafe\u0301",
    "na\u00efve r\u00e9sum\u00e9 \u0153uvre",
    "Stra\u00dfe \u00c4\u00d6\u00dc",
    "\u0141\u00f3d\u017a \u010desk\u00fd \u011fi\u015f",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f44d\U0001f3fd",
    "\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea",
    "\u2764\ufe0f",
    "text\U0001f680text \U0001f680",
    "\u00a0nbsp\u00a0",
    "\u3000\u5168\u89d2\u3000",
    "zero\u200bwidth",
    "\ufeffbom",
    "bell\x07 null\x00 del\x7f",
    "\u202eright-to-left\u202c",
    "z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324",
    "\U0001d4d0\U0001d4d1 \U00013080",
    "\ufffd",
    "\U0010ffff",
    "def f(x):\n    return x + 1\n",
    "\tif (a && b) {\n\t\treturn c->d[0];\n\t}\n",
    'fn main() { println!("{}", 1); }',
    '<div class="x">&amp;</div>',
    "SELECT * FROM t WHERE a >= 10;",
    "https://example.com/a?b=c&d=%20#e",
    "user@example.org",
    "C:\\Users\\name",
    "$x^2 + \\frac{1}{2}$",
    '{"key": [1, 2.5, null]}',
    "!!!???...",
    "--- *** ___",
    "a" * 50,
    "ab " * 20,
    "\n" * 10,
    " " * 33,
    "=" * 40,
    "....\n....",
    "a\nb\r\nc\rd",
    "<|im_start|>",
    "<|im_end|>\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y",
    " <|im_end|> ",
    "<|im_start|><|im_start|>",
    "<|im_start",
    "|im_end|>",
    "<|IM_END|>",
    "<repo_name>a<file_sep>b",
    "<empty_output>",
    "the<|im_end|>the",
    "12<|im_end|>34",
    "a\x04b",
    "\x16",
    "x\U00050000y",  # bytes that the vocabulary lacks: dropped
    "Supercalifragilisticexpialidocious",
    "don't stop. Don't",
    "it 's 's",
    "'",
    "''",
    '"',
    "\\",
    "\\n",
    "a  b   c    d",
    "x \n\n y",
    " \t \n \t ",
]


def main(path):
    tokenizer = build_tokenizer(read_fields(GGUFReader(path)))
    rows = []
    for text in STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        rows.append(
            {
                "text": text,
                "ids": ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                "decoded_skip_special": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    out = ROOT / "mlex-models/tests/data/smollm2-tokens.json"
    save_json_lines(out, rows)
    print(f"{out.relative_to(ROOT)}: {len(rows)} strings")


if __name__ == "__main__":
    main(*sys.argv[1:])
