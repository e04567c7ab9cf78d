"""Text to token ids and back, and text that is read as it grows."""

from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.tokenizer import load_tokenizer

__all__ = ["Detokenizer", "load_tokenizer"]
