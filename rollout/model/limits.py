"""Limits of supported Hugging Face decoders: engine and trainer refuse the same models, for the same reasons."""

from __future__ import annotations

from collections.abc import Mapping

ALTERED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config fields of models whose logits are not head(hidden): head(hidden) alone would be wrong for such models."""

UNSUPPORTED_ATTENTION = ("softcap", "s_aux")
"""Attention options (logit soft-capping, sinks) that neither attention of Parity computes."""

PLAIN_OUTPUTS = {"output_attentions": False, "return_dict": True}
"""Config fields that say what a model returns, not what it computes, as engine and trainer need them."""


def altered_logits(hf_config: object) -> str | None:
    """The change that a model makes to the logits after the head, as "field=value"; None if there is none."""
    for name in ALTERED_LOGITS:
        value = getattr(hf_config, name, None)
        if value not in (None, 1, 1.0):
            return f"{name}={value}"
    return None


def attention_window(hf_config: object) -> int | None:
    """Tokens that a layer with a sliding window attends to; None if the model has no such layer."""
    kinds = getattr(hf_config, "layer_types", None)
    is_used = kinds is None or "sliding_attention" in kinds
    return getattr(hf_config, "sliding_window", None) if is_used else None


def check_attention(options: Mapping[str, object], *, longest: int, name: str) -> None:
    """Raise ValueError if the `options` of a layer require a feature that attention `name` does not compute.

    `longest` is the length of the longest sequence, tokens.
    """
    for option in UNSUPPORTED_ATTENTION:
        if options.get(option) is not None:
            raise ValueError(f"{name} attention does not support {option}")
    window = options.get("sliding_window")
    if isinstance(window, int) and window < longest:
        raise ValueError(f"sequences of {longest} tokens exceed the model's sliding window of {window}")
