"""What those who train ask of an LLM between two rounds of generating: that it takes new weights,
and that it lends them its memory.
"""

from nanovllm.trainer.memory import sleep, wake_up
from nanovllm.trainer.new_weights import update_weights

__all__ = ["sleep", "update_weights", "wake_up"]
