"""One optimizer step of a method, and the same loss by its definition on plain forwards."""

import torch
from support.oracle import plain_logits

from camp_plugin.local.config import build_config
from camp_plugin.local.trainer import Trainer
from loss_hooks.host import use_host

EXACT = ("logit_tree", "packed_mask")
ALL = ("naive_compressed", "naive_full", *EXACT, "sdcc")
CLIP_LOW, CLIP_HIGH, DUAL, ENTROPY = 0.2, 0.28, 3.0, 0.01


def make_args(method, episodes, **overrides):
    values = {
        "hf_checkpoint": "none",
        "camp_method": method,
        "n_samples_per_prompt": len(episodes),
        "rollout_batch_size": 1,
        "global_batch_size": len(episodes),
        "max_tokens_per_gpu": 400,
        "eps_clip": CLIP_LOW,
        "eps_clip_high": CLIP_HIGH,
        "eps_clip_c": DUAL,
        "entropy_coef": ENTROPY,
        "use_rollout_logprobs": True,
    }
    if method == "sdcc":
        values["sdcc_warmup_fraction"] = 0.0
    return build_config({**values, **overrides})


def gradients(model, method, episodes, **overrides):
    """(mean loss, {parameter: gradient}, metrics) of one optimizer step."""
    trainer = Trainer(make_args(method, episodes, **overrides), model)
    with use_host(trainer.host):
        data = trainer.prepare(episodes, 0)
        data["log_probs"] = data["ref_log_probs"] = None
        metrics = trainer.accumulate(data, 0, 0)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return metrics["loss"], found, metrics


def leaf_weights(model):
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def oracle_loss(model, episodes):
    """Mean over rollouts of the token-mean policy loss, by the definition, token by token."""
    weights = leaf_weights(model)
    rewards = [e.reward for e in episodes]
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    total = torch.zeros((), dtype=torch.float64)
    for e in episodes:
        advantage = (e.reward - mean) / (std + 1e-6)
        terms = []
        for t in e.turns:
            prompt, output = t.prompt_ids.tolist(), t.output_ids.tolist()
            rows = plain_logits(weights, model.config, prompt + output)[len(prompt) - 1 : -1]
            for row, token, old in zip(rows, output, t.output_logprobs, strict=True):
                probs = torch.exp(row - row.max())
                probs = probs / probs.sum()
                ratio = torch.exp(torch.log(probs[token]) - float(old))
                loss = -torch.minimum(
                    ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
                )
                if advantage < 0:
                    loss = torch.minimum(loss, torch.tensor(-DUAL * advantage))
                terms.append(loss + ENTROPY * (probs * torch.log(probs)).sum())
        total = total + sum(terms) / len(terms)
    loss = total / len(episodes)
    loss.backward()
    return float(loss.detach()), {name: w.grad for name, w in weights.items()}


def assert_same_gradients(found, expected, tolerance):
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= tolerance * scale, name
