"""The oracle itself, held against transformers at float32 tolerance."""

import pytest
import torch
from support.models import VOCAB, tiny_model
from support.oracle import plain_logits


@pytest.mark.parametrize("kind", ("llama", "qwen3"))
def test_plain_forward_equals_transformers(kind):
    model = tiny_model(kind, float64=False)
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    found = plain_logits(weights, model.config, ids)
    assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())
