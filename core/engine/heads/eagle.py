"""EAGLE's heads: layers over each token's embedding joined with a hidden state of the served model.

Li et al., EAGLE (2024) and EAGLE-2 (2024), whose checkpoints are alike: one linear layer joins both, a decoder layer
without its first norm follows, and its output stands for the next hidden state. Li et al., EAGLE-3 (2025): the state
is joined from three layers of the served model, attention reads both side by side, and the vocabulary may be smaller.
Drafts are a chain here; the trees of EAGLE-2 need attention that is not causal.

Legend of shapes: T tokens of a step, R rows of logits, H hidden size, V vocabulary, D the head's vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.engine.heads.head import Head, Write


class Eagle(Head):
    """A head of EAGLE or EAGLE-2."""

    def __init__(self, decoder: Any, embedding: nn.Module, lm_head: nn.Module, *, bias: bool) -> None:
        """decoder: transformers' model of the head's configuration, changed here. bias: of the layer that joins."""
        super().__init__(decoder.config, embedding)
        size = self.state_size
        self.fc = nn.Linear(2 * size, size, bias=bias, dtype=decoder.dtype)
        decoder.layers[0].input_layernorm = nn.Identity()
        decoder.norm = nn.Identity()
        decoder.embed_tokens = nn.Identity()  # never called: what it would embed is given
        self.decoder = decoder
        self.lm_head = lm_head

    def compute(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoder's output twice: logits are made of it as of the served model's."""
        joined = self.fc(torch.cat((embedded, states), dim=-1))
        out = self.decoder(inputs_embeds=joined, position_ids=positions, use_cache=False).last_hidden_state
        return out, out

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits (1, R, V)."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class Eagle3(Head):
    """A head of EAGLE-3."""

    def __init__(
        self, decoder: Any, embedding: nn.Module, lm_head: nn.Module, *, layers: tuple[int, ...], vocab_size: int
    ) -> None:
        """decoder: as of `Eagle`, with one layer. layers: of the served model, whose inputs are joined. vocab_size: V;
        lm_head may give logits of fewer tokens, and `d2t` says which: the distance of each to its own id."""
        super().__init__(decoder.config, embedding)
        config, size, (layer,) = decoder.config, self.state_size, decoder.layers
        attention, norm = layer.self_attn, type(layer.input_layernorm)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            wider = nn.Linear(2 * size, old.out_features, bias=old.bias is not None, dtype=decoder.dtype)
            setattr(attention, name, wider)
        self.fc = nn.Linear(len(layers) * size, size, bias=False, dtype=decoder.dtype)
        self.hidden_norm = norm(size, eps=config.rms_norm_eps).to(decoder.dtype)
        self.layer, self.norm, self.rotary = layer, decoder.norm, decoder.rotary_emb
        self.lm_head = lm_head
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.d2t: Tensor
        self._layers = layers
        self._vocab_size = vocab_size
        self._norms_residual = bool(getattr(config, "norm_before_residual", False))

    def compute(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output with its norm, and without."""
        from transformers.masking_utils import create_causal_mask

        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        normed = self.hidden_norm(states)
        both = torch.cat((self.layer.input_layernorm(embedded), normed), dim=-1)
        turned = self.rotary(embedded, position_ids=positions)
        attended = self.layer.self_attn(hidden_states=both, position_embeddings=turned, attention_mask=mask)[0]
        residual = attended + (normed if self._norms_residual else states)
        out = residual + self.layer.mlp(self.layer.post_attention_layernorm(residual))
        return self.norm(out), out

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits (1, R, V); those of tokens that the head does not know are -inf."""
        logits: Tensor = self.lm_head(hidden)
        if logits.shape[-1] == self._vocab_size:
            return logits
        known = torch.arange(logits.shape[-1], device=logits.device) + self.d2t
        whole = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        return whole.index_copy(-1, known, logits)

    def listen(self, model: Any, write: Write) -> list[RemovableHandle]:
        """Join what the chosen layers of each forward are given, and call `write` with that."""
        decoder = model.get_decoder()
        given: list[Tensor] = []

        def forward_pre_hook(_module: nn.Module, arguments: Any, named: Any) -> None:
            given.append(arguments[0] if arguments else named["hidden_states"])

        def forward_hook(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            joined = self.fc(torch.cat(given, dim=-1).to(self.fc.weight.dtype))
            given.clear()
            write(joined[0])

        before = [
            decoder.layers[index].register_forward_pre_hook(forward_pre_hook, with_kwargs=True)
            for index in self._layers
        ]
        return [*before, decoder.register_forward_hook(forward_hook)]


def layers_read(config: Any, num_layers: int) -> tuple[int, ...]:
    """Return which layers' inputs an EAGLE-3 head is given: an early, a middle and a late one, if it states none."""
    stated = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    return tuple(stated) if stated else (2, num_layers // 2, num_layers - 3)
