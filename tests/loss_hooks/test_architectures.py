"""`packed_mask` on other Hugging Face decoders: it works, or it refuses by name."""

import numpy as np
import pytest
import torch
import transformers

from camp_plugin.local.forward import hidden_states
from camp_plugin.local.host import LocalHost
from harness_bridges.errors import CampError
from loss_hooks.prefix_tree import build_tree
from loss_hooks.tree_attention import make_layout

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def build(name, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2", "Gemma"))
def test_packed_forward_equals_each_path_alone(name):
    model = build(name)
    LocalHost(model)
    rng = np.random.default_rng(1)
    trunk = rng.integers(1, 97, 20)
    paths = [np.concatenate([trunk[:k], rng.integers(1, 97, 9)]) for k in (20, 20, 7, 13)]
    tree, located = build_tree(paths)
    with torch.no_grad():
        layout = make_layout(tree.nodes, tree.positions)
        packed = hidden_states(
            model, torch.from_numpy(tree.tokens), torch.from_numpy(tree.positions), layout
        )
        for path, rows in zip(paths, located, strict=True):
            alone = model.get_decoder()(input_ids=torch.from_numpy(path)[None]).last_hidden_state[0]
            torch.testing.assert_close(packed[rows], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Gemma2", {}, "softcap"),
        ("Mistral", {"sliding_window": 2}, "sliding_window"),
        ("Cohere", {"logit_scale": 0.25}, "logit_scale"),
    ],
)
def test_other_attention_is_refused_by_name(name, changes, reason):
    with pytest.raises(CampError, match=reason):
        LocalHost(build(name, **changes))


def test_linear_attention_layers_are_refused():
    model = build(
        "Qwen3Next",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(CampError, match="tree attention differs from a plain forward"):
        LocalHost(model)
