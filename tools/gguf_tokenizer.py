"""The tokenizer in a GGUF file's metadata, rebuilt with Hugging Face's `tokenizers`."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL, USER_DEFINED = 3, 4

# SmolLM's tokenizer.json takes digits one by one and then splits as GPT-2 does.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}


def read_fields(reader):
    """The metadata of a gguf.GGUFReader as plain values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def build_tokenizer(fields):
    """A `tokenizers.Tokenizer` of the byte-level BPE in `fields` (see read_fields)."""
    if fields["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"tokenizer.ggml.model: expected gpt2, found {fields['tokenizer.ggml.model']}")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=None))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[fields["tokenizer.ggml.pre"]]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens(added)
    return tokenizer


def tokenizer_config(fields):
    """tokenizer_config.json for the same tokenizer."""
    tokens = fields["tokenizer.ggml.tokens"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config
