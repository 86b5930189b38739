# SPDX-License-Identifier: Apache-2.0
"""The demo's card in the repository is what the template makes today."""

from pathlib import Path

import torch
from transformers import Qwen3Config

import attnres.model_cards.card
from attnres import AttnResConfig, __version__
from attnres.model_cards.card import CardContent, render_model_card


def test_the_demos_card_is_not_stale():
    """All of it but the figures of its verification and the versions they were made with; it has no hash of code."""
    card = Path(attnres.model_cards.__file__).with_name("attnres-demo.md").read_text()
    before, _, parity = card.partition("\nand torch ")
    torch_version, _, parity = parity.partition(".\n\n")
    transformers_version = before.rpartition("transformers ")[2]
    base = Qwen3Config(
        hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    versions = {"attnres": __version__, "transformers": transformers_version, "torch": torch_version}
    content = CardContent(
        AttnResConfig.from_base_config(base, block_size=2, architectures=["AttnResForCausalLM"]),
        torch.zeros(9, 128),
        title="attnres-demo",
        repo_id="attnres-demo",
        report={"operation": "Conversion", "source": "base", "versions": versions},
        parity=parity.partition("\n\n## Limits")[0],
    )
    rendered = render_model_card(content)
    lines = [line for line in str(rendered).splitlines() if not line.startswith("attnres_code_sha256")]
    assert lines == card.splitlines()
