"""What mlx-lm generates and scores with SmolLM2: mlex-models/tests/data/smollm2-golden.json.

`python tools/make_smollm2_golden.py MLX_DIR`, with a directory made by gguf_to_mlx.py (float32). Greedy
tokens do not stop at EOS. A few minutes on a CPU.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from transformers import PreTrainedTokenizerFast

from goldens import ROOT, save_json

GENERATED, TOP = 48, 3

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CODE = 'def fibonacci(n):\n    """Returns the n-th Fibonacci number."""\n'
STORY = """The lighthouse on the northern cape had been built in the summer of 1871, when ships from eleven countries passed \
the rocks every week and three of them were lost in a single night. Its keeper, a quiet man called Anders, wrote down \
the weather each morning in a grey book: the wind, the height of the waves, the colour of the sky, and the number of \
sails he could count before breakfast. On the second page he noted that the lamp burned four litres of oil between \
dusk and dawn; on the third, that his daughter had learned to read.

When the company sent an engineer to replace the lamp with an electric one, Anders carried the old lens down the \
stairs himself, wrapped in two blankets, and put it in the window of the kitchen. "It has looked at the sea for \
thirty years," he said, "so it should not have to stop now." The engineer laughed, but he wrote the sentence down, \
and many years later he began a lecture with it. He explained to his students that a machine is a promise: someone \
has decided what must happen every night, and someone else has agreed to make it happen. If the promise is kept, \
nobody notices. If it is broken, everybody does.

Today the tower is a museum. Visitors pay 12.50 for a ticket, climb 214 steps, and are shown the grey book under \
glass. Most of them turn to the window first. The sea is the same as it was, although the ships are larger and \
there are fewer of them, and at night a small white light still turns above the rocks, twice every ten seconds. The guide always ends \
the tour with the same question:"""
SCORED = """Water boils at a lower temperature on a high mountain because the air pressure is lower there. At sea level \
it boils at 100 degrees Celsius; at the top of Mount Everest it boils at about 71 degrees. For this reason, cooking \
rice or eggs takes longer in the mountains, and people often use a pressure cooker. The lid of the pot keeps the \
steam inside, so the pressure rises and the water becomes hotter before it boils. A simple rule says that the \
boiling point falls by about one degree for every 300 metres of height, which is close enough for a kitchen."""


def greedy(model, ids):
    """GENERATED tokens by argmax, and the smallest distance to the second best."""
    cache = make_prompt_cache(model)
    logits = model(mx.array(ids)[None], cache=cache)[0, -1]
    tokens, margins = [], []
    for _ in range(GENERATED):
        scores = np.array(logits)
        second, best = np.argsort(scores)[-2:]
        tokens.append(int(best))
        margins.append(float(scores[best] - scores[second]))
        logits = model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]
    return tokens, min(margins)


def score(model, ids):
    """Log-probability of each token after those before it (the first has none), and the best TOP at its place."""
    logits = np.array(model(mx.array(ids)[None])[0]).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    own, top = [None], [None]
    for row, token in zip(logprobs, ids[1:]):
        own.append(round(float(row[token]), 6))
        top.append([{"id": int(i), "logprob": round(float(row[i]), 6)} for i in np.argsort(-row)[:TOP]])
    return own, top


def main(folder):
    folder = Path(folder)
    model, _ = load_model(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(FRANCE, tokenize=False, add_generation_prompt=True)
    prompts = []
    for name, messages, text in (("france", FRANCE, chat), ("code", None, CODE), ("story", None, STORY)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, margin = greedy(model, ids)
        prompts.append(
            {
                "name": name,
                "messages": messages,
                "text": text,
                "ids": ids,
                "greedy": tokens,
                "greedy_text": tokenizer.decode(tokens),
                "smallest_margin": round(margin, 4),
            }
        )
        print(f"{name}: {len(ids)} tokens, smallest margin {margin:.4f}: {prompts[-1]['greedy_text']!r}")
    ids = tokenizer(SCORED, add_special_tokens=False)["input_ids"]
    logprobs, top = score(model, ids)
    perplexity = float(np.exp(-np.mean(logprobs[1:])))
    print(f"scored text: {len(ids)} tokens, perplexity {perplexity:.4f}")
    save_json(
        ROOT / "mlex-models/tests/data/smollm2-golden.json",
        {
            "model": "SmolLM2-135M-Instruct.Q4_1.gguf, float32 activations",
            "gguf_sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "reference": "mlx-lm 0.31.3 on mlx 0.31.2 (CPU)",
            "prompts": prompts,
            "score": {"text": SCORED, "ids": ids, "logprobs": logprobs, "top": top, "perplexity": perplexity},
        },
        indent=None,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
