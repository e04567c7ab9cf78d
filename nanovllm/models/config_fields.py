"""What a configuration says of a model's layers, where it may say it in more than one form."""


def head_size(config) -> int:
    """Given by newer configurations, derived in older ones."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def window_of(config, index: int) -> int | None:
    """How many tokens a token sees in layer `index`, itself included; None: all up to itself.

    A window of all positions is none. A size may stand next to a switch that turns it off.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    is_local = not kinds or kinds[index] == "sliding_attention"
    if not window or not getattr(config, "use_sliding_window", True) or not is_local:
        return None
    return window if window < config.max_position_embeddings else None


def largest_window(config) -> int | None:
    """The most tokens that a token sees in any layer; None: some layer sees all up to itself."""
    windows = [window_of(config, index) for index in range(config.num_hidden_layers)]
    sizes = [window for window in windows if window is not None]
    return max(sizes) if len(sizes) == len(windows) else None


def layer_kind(config, index: int) -> str:
    """The name under which a configuration may say something of layer `index` and its like."""
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else "full_attention"


def activation_name(config) -> str:
    """Of the MLP's activation. Gemma has a name of its own for it, which wins there."""
    name = getattr(config, "hidden_activation", None)
    return getattr(config, "hidden_act", "silu") if name is None else name
