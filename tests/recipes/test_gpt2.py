"""The recipe gpt2: it trains on a made and on a real text, and its hand-written parts compute what they should."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fastloop.errors import ConfigError


@pytest.fixture
def gpt2(recipe):
    return recipe("gpt2")


def test_tiny_trains_and_validates(gpt2, fit):
    module, data = gpt2.build(gpt2.Settings(size="tiny"))
    losses, trainer = fit(module, data, max_steps=20, accumulate_grad_batches=2, limit_train_batches=40)
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)  # it starts out knowing nothing
    assert sum(losses[-4:]) < sum(losses[:4])
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)


def test_batches_are_windows_and_the_same_one_token_on(gpt2):
    _, data = gpt2.build(gpt2.Settings(size="tiny"))
    data.prepare_data()
    data.setup("fit")
    tokens, following = next(iter(data.train_dataloader()))
    assert tokens.shape == following.shape == (8, 64)
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert data.train_set[1][0][0] == data.train_set[0][0][16]  # windows for training overlap
    for windows in (data.train_set, data.val_set):
        assert len(windows[len(windows) - 1][1]) == 64
        assert (len(windows) * windows.stride) + 65 > len(windows.tokens)  # none is left over


def test_default_is_the_124_million_shape(gpt2):
    with torch.device("meta"):
        module, data = gpt2.build(gpt2.Settings())
    assert sum(parameter.numel() for parameter in module.parameters()) == 124_439_808
    assert (data.batch_size, data.context) == (8, 1024)
    assert module.blocks[0].dropout.p == 0.1


def test_attention_is_softmax_attention_over_the_past(gpt2):
    torch.manual_seed(0)
    attention = gpt2.Attention(gpt2.Shape(heads=2, width=16, context=8, dropout=0.0))
    x = torch.randn(3, 8, 16)
    q, k, v = (part.view(3, 8, 2, 8).transpose(1, 2) for part in attention.qkv(x).split(16, dim=2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, 8, 16)
    assert torch.allclose(attention(x), attention.proj(expected), atol=1e-6)


def test_initial_weights_are_gpt2s(gpt2):
    torch.manual_seed(0)
    module, _ = gpt2.build(gpt2.Settings(size="tiny"))
    block = module.blocks[0]
    assert block.expand.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.proj.weight.std().item() == pytest.approx(0.01, rel=0.1)  # 0.02 / sqrt(2 x 2 layers)
    assert not block.expand.bias.any()
    assert (block.norm_1.weight == 1).all()


def test_trains_on_a_real_text(gpt2, fit, real):
    module, data = gpt2.build(gpt2.Settings(size="tiny", data=real("tinyshakespeare.txt")))
    losses, _ = fit(module, data)
    assert all(math.isfinite(loss) for loss in losses)
    assert bytes(data.train_set[0][0].tolist()).startswith(b"First Citizen:\nBefore we proceed")


def test_a_text_too_short_is_refused(gpt2, tmp_path):
    text = tmp_path / "note.txt"
    text.write_text("short")
    _, data = gpt2.build(gpt2.Settings(data=str(text)))
    with pytest.raises(ConfigError, match="has 5 bytes, but windows of 1024 tokens need 20480"):
        data.prepare_data()


def test_a_folder_is_refused(gpt2, tmp_path):
    _, data = gpt2.build(gpt2.Settings(data=str(tmp_path)))
    with pytest.raises(ConfigError, match="reads one text file"):
        data.prepare_data()
