"""Small GGUF models and what mlx-lm computes from their values: mlex-models/tests/data/gguf/.

`python tools/make_model_gguf.py [NAME]...`. Each `NAME.gguf` is written by the `gguf` package, which also
gives the tensors' names, quantizes blocks and says what values they have; the query and key rows of the
llama architecture are permuted as llama.cpp's converter does. `NAME.expected.safetensors` holds

  tokens [L]      a prompt
  logits [L, V]   what mlx-lm gives for it, from the file's own values in float32
  greedy [16]     tokens chosen by argmax after the prompt

"""

import sys

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from goldens import save_tensors
from make_model_golden import DATA, LLAMA, QWEN2, QWEN3, SMALL, clear_prompt, one_pass, random_weight

OUT = DATA / "gguf"
CONTROL, NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL

# A type for every kind of block that MLX has a layout for, and both halves; 36 columns are no whole blocks.
MIXED = {
    "embed_tokens": Type.Q8_0,
    "q_proj": Type.Q4_0,
    "k_proj": Type.Q4_1,
    "v_proj": Type.Q5_0,
    "o_proj": Type.Q5_1,
    "gate_proj": Type.Q4_1,
    "up_proj": Type.BF16,
    "down_proj": Type.F16,
    "lm_head": Type.Q4_1,
}
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)

# name: (config, type of the matrices or types by layer)
MODELS = {
    "llama": ({**SMALL, **LLAMA}, Type.F32),
    "llama-blocks": ({**SMALL, **LLAMA}, MIXED),
    "llama-bias": ({**SMALL, **LLAMA, "attention_bias": True, "mlp_bias": True}, Type.F16),
    "llama-rope-freqs": ({**SMALL, **LLAMA, "rope_scaling": LLAMA3}, Type.F16),
    "llama-tied": ({**SMALL, **LLAMA, "tie_word_embeddings": True}, Type.F16),
    "qwen2": ({**SMALL, **QWEN2, "num_attention_heads": 2, "num_key_value_heads": 1}, Type.F16),
    "qwen3": ({**SMALL, **QWEN3}, Type.F16),
}


def vocabulary():
    """Tokens, their types and the merges of a byte-level BPE of 64 tokens."""
    tokens = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", *".,?!", "Ã", "©"]
    pairs = "t h,h e,i n,e r,a n,r e,o n,a t,e n,n d,Ġ t,Ġ a,Ġ th,th e,Ġ the,in g,a nd,Ġa nd,o r,e s,i s,Ġ is"
    merges = pairs.split(",")
    tokens += [merge.replace(" ", "") for merge in merges] + ["<a>", "<b>", "<c>", "<d>"]
    tokens = list(dict.fromkeys(tokens))
    tokens += [f"<unused{i}>" for i in range(64 - len(tokens) - 1)] + ["<|end|>"]
    kinds = [CONTROL if token.startswith("<") and len(token) > 1 else NORMAL for token in tokens]
    return tokens, kinds, merges


TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ' ' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)


def permuted(rows, heads):
    """The rows of a query or key projection with each head's two halves interleaved."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def frequency_factors(config):
    """What Llama 3.1's scaling multiplies each wavelength by."""
    scaling, dims = config["rope_scaling"], config["head_dim"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original / (2 * np.pi * config["rope_theta"] ** (np.arange(0, dims, 2) / dims))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def type_of(name, shape, types):
    if len(shape) == 1:
        return Type.F32
    return types[name.split(".")[-2]] if isinstance(types, dict) else types


def stored(values, kind):
    """The bytes that a file holds for `values`, and the values that they have."""
    blocks = gguf.quants.quantize(values, kind)
    return blocks, gguf.quants.dequantize(blocks, kind).astype(np.float32)


def write(path, config, tensors):
    """Writes `tensors` (MLX names to values and types) as a GGUF file; returns the values as they are read."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(path.stem)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    tokens, kinds, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(tokens.index("<|end|>"))
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)

    known = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    names = gguf.get_tensor_name_map(known[arch], config["num_hidden_layers"])
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", frequency_factors(config))
    as_read = {}
    for name, (values, kind) in tensors.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        turn = arch == "llama" and heads is not None
        blocks, values = stored(permuted(values, config[heads]) if turn else values, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), blocks, raw_dtype=kind)
        if turn:
            values = values.reshape(config[heads], -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        as_read[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return as_read


def make(name):
    config, types = MODELS[name]
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    shapes = {
        path: value.shape
        for path, value in tree_flatten(model.parameters())
        if not path.rsplit(".", 1)[-1].startswith("_")
    }
    tensors = {
        path: (np.array(random_weight(path, shape)), type_of(path, shape, types))
        for path, shape in sorted(shapes.items())
    }
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.gguf"
    as_read = write(path, config, tensors)
    model.update(tree_unflatten([(key, mx.array(value)) for key, value in as_read.items()]))
    prompt, greedy, _, _ = clear_prompt(name, [model], config["vocab_size"], 0.02)
    values = {"tokens": prompt, "logits": one_pass(model, prompt), "greedy": np.array(greedy)}
    save_tensors(OUT / f"{name}.expected.safetensors", values)
    print(f"{path.name}: {path.stat().st_size // 1024} KB")


def main(names):
    for name in names or MODELS:
        make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
