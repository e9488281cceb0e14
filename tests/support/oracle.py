"""A plain float64 decoder forward, written from the architecture, sharing no code with ours.

Llama and Qwen3: RMSNorm, RoPE (rotate-half), grouped queries, optional per-head QK-norm, SwiGLU.
transformers casts to float32 inside its norms and softmax even for float64 weights, so it cannot
serve as the oracle; `test_oracle.py` holds this one against it at float32 tolerance.
"""

import torch


def _norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rope(x, theta):
    """x: [T, heads, dim]."""
    length, _, dim = x.shape
    angles = torch.arange(length, dtype=torch.float64)[:, None] / theta ** (
        torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    cos, sin = torch.cos(angles)[:, None], torch.sin(angles)[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attention(q, k, v):
    length, heads, dim = q.shape
    groups = heads // k.shape[1]
    outs = []
    for h in range(heads):
        scores = q[:, h] @ k[:, h // groups].T / dim**0.5
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values.detach())
        weights = torch.where(hidden, torch.zeros_like(weights), weights)
        outs.append(weights / weights.sum(-1, keepdim=True) @ v[:, h // groups])
    return torch.cat(outs, -1)


def plain_logits(weights, config, ids):
    """Logits `[T, V]` of one sequence of token ids, positions 0..T-1.

    weights: the model's state dict as float64 tensors; config: its transformers config.
    """
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    eps, theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
    x = weights["model.embed_tokens.weight"][torch.as_tensor(ids)]
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}."
        h = _norm(x, weights[p + "input_layernorm.weight"], eps)
        q, k, v = (
            (h @ weights[f"{p}self_attn.{n}_proj.weight"].T).view(len(ids), -1, dim) for n in "qkv"
        )
        if p + "self_attn.q_norm.weight" in weights:
            q = _norm(q, weights[p + "self_attn.q_norm.weight"], eps)
            k = _norm(k, weights[p + "self_attn.k_norm.weight"], eps)
        out = _attention(_rope(q, theta), _rope(k, theta), v)
        x = x + out @ weights[p + "self_attn.o_proj.weight"].T
        h = _norm(x, weights[p + "post_attention_layernorm.weight"], eps)
        gate, up = (h @ weights[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[p + "mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(x, weights["model.norm.weight"], eps) @ head.T


def turn_log_probs(weights, config, turn, temperature=1.0):
    """Log-prob of each sampled token of a turn under its own recorded prompt."""
    prompt, output = turn.prompt_ids.tolist(), turn.output_ids.tolist()
    if not output:
        return torch.zeros(0, dtype=torch.float64)
    logits = plain_logits(weights, config, prompt + output) / temperature
    rows = logits[len(prompt) - 1 : -1]
    shifted = rows - rows.max(-1, keepdim=True).values.detach()
    picked = shifted[torch.arange(len(output)), torch.tensor(output)]
    return picked - torch.log(torch.exp(shifted).sum(-1))
