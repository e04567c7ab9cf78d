"""Real weights, where the packages that hold them are installed: see real_models.py."""

import pytest
from real_models import PACKAGES, PROMPTS, check_model, is_installed, make_folder


@pytest.mark.parametrize("model", PACKAGES)
def test_greedy_output_of_real_weights_is_transformers(model, tmp_path):
    """Some prompts of each kind; the script compares them all, and more tokens."""
    if not is_installed(model):
        pytest.skip(f"{', '.join(PACKAGES[model])}, gguf or accelerate are not installed")
    make_folder(model, tmp_path)
    check_model(tmp_path, PROMPTS[::8], 12)
