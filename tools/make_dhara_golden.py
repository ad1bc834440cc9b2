"""Small Dhara checkpoints and what mlx-optiq computes from them: mlex-models/tests/data/dhara_ar-*/, and the tokens
of its block diffusion and self-speculation: mlex-models/tests/data/dhara-blocks.json.

`pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2 && pip install --no-deps mlx-optiq==0.7.7`, then
`python tools/make_dhara_golden.py [NAME]...`. The files are those of make_model_golden.py. Rows of the batch
are computed alone: in a padded batch mlx-optiq rotates all rows from the position of the first, and lets the
convolutions see the padding. A row of dhara-blocks.json is a generation: `checkpoint`, `prompt`, `decode`, its
settings and the `tokens`; the penalty looks at all tokens before.

Two things are not as mlx-optiq has them. The masks of blocks are floats: mlx-optiq makes them in the type of the
embedding's weight, which is uint32 when that is quantized, and there minus infinity is 0 and -1e9 is 3294967296,
so that positions see just what they must not; as it is, it gives the same tokens on the dequantized weights. And
the models do not write the mask token, which mlx-optiq's self-speculation takes for one to be filled in.
"""

import sys

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from optiq.mlx_lm_patches import dhara_ar, dhara_decode

import make_model_golden as golden
from goldens import save_json_lines, save_tensors

BASE = dict(
    model_type="dhara_ar",
    architectures=["DharaARForCausalLM"],
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=36,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    rms_norm_eps=1e-6,
    rope_theta=8000000.0,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    use_qk_norm=True,
    use_logit_softcap=True,
    logit_softcap=10.0,
    canon_set="ABCD",
    canon_kernel=4,
    canon_residual=True,
    canon_activation=False,
    canon_bias=False,
    mask_token_id=63,
    bos_token_id=1,
    eos_token_id=2,
)
WIDE = dict(hidden_size=64, intermediate_size=64)
MASK = BASE["mask_token_id"]

# The mask token's rows are a tenth of what they would be: its logit stays near 0, where some other is above.
FAINT_MASK = mx.array(np.where(np.arange(BASE["vocab_size"]) == MASK, 0.1, 1.0)[:, None].astype(np.float32))
GAINS = {"embed_tokens.weight": FAINT_MASK, "lm_head.weight": FAINT_MASK}


def published(weights, config):
    """The convolutions as PyTorch has them."""
    return {
        name: value.transpose(0, 2, 1) if name.endswith(".conv.weight") else value for name, value in weights.items()
    }


CHECKPOINTS = {
    "dhara_ar-abcd": (BASE, {}),
    "dhara_ar-a": ({**BASE, "canon_set": "A", "canon_bias": True, "use_qk_norm": False}, {}),
    "dhara_ar-b": ({**BASE, "canon_set": "B", "canon_activation": True, "tie_word_embeddings": False}, {}),
    "dhara_ar-cd": ({**BASE, "canon_set": "CD", "canon_kernel": 3, "canon_residual": False}, {}),
    "dhara_ar-none": ({**BASE, "canon_set": "", "use_logit_softcap": False}, {}),
    "dhara_ar-hf": (BASE, dict(layout=published, extra={"lm_head.weight": (64, 32)})),
    "dhara_ar-4bit": ({**BASE, **WIDE}, dict(quantize=dict(group_size=32, bits=4))),
}


def classes(config):
    """As mlx-lm looks for the classes of a config, whatever it is."""
    return dhara_ar.Model, dhara_ar.ModelArgs


def expected(name, model, vocabulary):
    prompt, tokens, margins, rows = golden.clear_prompt(name, [model], vocabulary, 0.02)
    padding = [max(golden.BATCH_LENGTHS) - n for n in golden.BATCH_LENGTHS]
    batch = np.stack([np.concatenate([np.zeros(pad, np.int64), row]) for pad, row in zip(padding, rows)])
    alone = [np.array(golden.one_pass(model, row)) for row in rows]
    logits = np.stack([np.pad(values, ((pad, 0), (0, 0))) for pad, values in zip(padding, alone)])
    return {
        "tokens": prompt,
        "logits": golden.one_pass(model, prompt),
        "greedy": np.array(tokens),
        "greedy_margin": np.array(margins),
        "batch_tokens": batch,
        "batch_left_padding": np.array(padding),
        "batch_logits": logits,
    }


class NoText:
    """A tokenizer whose end-of-text token no generation meets."""

    eos_token_id = -1

    def encode(self, text, **options):
        return [self.eos_token_id]


def float_masks(model):
    """The type of the masks of blocks."""
    return model.model.norm.weight.dtype


def greedy(model, prompt, count, rep):
    """`count` tokens, one after the other."""
    cache, seen, new = model.make_cache(), prompt.tolist(), prompt
    for _ in range(count):
        logits = model(mx.array(new)[None], cache=cache)[0, -1:]
        new = np.array(dhara_decode._rep_pen(logits, np.array(seen), rep, logits.shape[-1]).argmax(axis=-1))
        seen += new.tolist()
    return seen[len(prompt) :]


def generations():
    """The rows of dhara-blocks.json."""
    for name in ("dhara_ar-abcd", "dhara_ar-b", "dhara_ar-none", "dhara_ar-4bit"):
        model, _ = load_model(golden.DATA / name, get_model_classes=classes)
        for length, rep in ((1, 1.0), (5, 1.3), (8, 1.0), (21, 1.3), (40, 1.0)):
            rng = np.random.default_rng([length, len(name)])
            prompt = rng.integers(3, 60, length)
            row = dict(checkpoint=name, prompt=prompt.tolist(), penalty=rep)
            for block, threshold in ((32, 0.5), (8, 0.9), (4, 0.2)):
                settings = dict(block_len=block, threshold=threshold, max_new=40, rep=rep)
                tokens = dhara_decode.diffusion_ids(model, NoText(), prompt, **settings)
                yield dict(
                    **row, decode="diffusion", block_length=block, threshold=threshold, tokens=tokens.tolist()
                )
            one_by_one = greedy(model, prompt, 40, rep)
            for draft, block in ((8, 32), (4, 8), (2, 3)):
                settings = dict(k=draft, block_len=block, max_new=40, rep=rep)
                tokens = dhara_decode.selfspec_ids(model, NoText(), prompt, **settings).tolist()
                if tokens != one_by_one or MASK in tokens:
                    raise RuntimeError(f"{name}: a prompt of {length} tokens: not the greedy tokens, or the mask token")
                yield dict(**row, decode="self-spec", draft_length=draft, block_length=block, tokens=tokens)


def main(names):
    golden.classes = classes
    dhara_decode._mask_dtype = float_masks
    mx.set_default_device(mx.cpu)
    for name in names or CHECKPOINTS:
        config, options = CHECKPOINTS[name]
        options = dict(options)
        filing = {key: options.pop(key) for key in ("layout", "extra") if key in options}
        model, config, _ = golden.build(config, gains=GAINS, **options)
        folder = golden.DATA / name
        golden.save(folder, model, config, **filing)
        model, _ = load_model(folder, get_model_classes=classes)
        values = expected(name, model, config["vocab_size"])
        save_tensors(folder / "expected.safetensors", values)
        spread = float(mx.std(values["logits"]))
        print(f"{name}: logits' deviation {spread:.2f}, smallest greedy margin {min(values['greedy_margin']):.3f}")
    rows = list(generations())
    save_json_lines(golden.DATA / "dhara-blocks.json", rows)
    print(f"dhara-blocks.json: {len(rows)} generations")


if __name__ == "__main__":
    main(sys.argv[1:])
