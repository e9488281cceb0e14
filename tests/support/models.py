"""Tiny models: Hugging Face ones made pure float64, and a whole model directory to point at."""

import torch
from torch import nn

VOCAB = 61


class _Norm64(nn.Module):
    def __init__(self, source):
        super().__init__()
        self.weight, self.eps = source.weight, source.variance_epsilon

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _Rotary64(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self.inverse = config.rope_parameters["rope_theta"] ** -exponent

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _swap(module, config):
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, _Norm64(child))
        elif type(child).__name__.endswith("RotaryEmbedding"):
            setattr(module, name, _Rotary64(config))
        else:
            _swap(child, config)


def tiny_config(kind, vocab=VOCAB, layers=3):
    from transformers import LlamaConfig, Qwen3Config

    cls = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    return cls(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=kind == "qwen3",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
    )


def tiny_model(kind, *, seed=0, float64=True, **kwargs):
    """A transformers model with large random weights, so that contexts matter."""
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM

    torch.manual_seed(seed)
    cls = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[kind]
    model = cls(tiny_config(kind, **kwargs)).eval()
    if float64:
        model = model.double()
        _swap(model, model.config)
    return model


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING_TEMPLATE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(template=TEMPLATE):
    """A byte-level BPE trained on the spot, with ChatML special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["user assistant system the answer <search> </search> <answer> </answer> think " * 20]
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def tiny_model_dir(path, *, seed=0):
    """Write a model directory: random tiny Llama, trained tokenizer, chat template."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", seed=seed, float64=False, vocab=len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
