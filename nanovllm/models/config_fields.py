"""Fields that configurations give in more than one form."""


def head_size(config) -> int:
    """Return the size of an attention head. Older configurations do not give it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def window_of(config, index: int) -> int | None:
    """Return how many tokens a token sees in layer `index`, itself included.

    None: it sees all up to itself. A window as large as the model's context is none, and
    use_sliding_window may turn a size off.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    is_local = not kinds or kinds[index] == "sliding_attention"
    if not window or not getattr(config, "use_sliding_window", True) or not is_local:
        return None
    return window if window < config.max_position_embeddings else None


def largest_window(config) -> int | None:
    """Return the largest window of any layer; None if a layer has none."""
    windows = [window_of(config, index) for index in range(config.num_hidden_layers)]
    sizes = [window for window in windows if window is not None]
    return max(sizes) if len(sizes) == len(windows) else None


def layer_kind(config, index: int) -> str:
    """Return the kind of layer `index`, by which configurations name settings of such layers."""
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else "full_attention"


def activation_name(config) -> str:
    """Return the name of the MLP's activation. hidden_activation, Gemma's field, comes first."""
    name = getattr(config, "hidden_activation", None)
    return getattr(config, "hidden_act", "silu") if name is None else name
