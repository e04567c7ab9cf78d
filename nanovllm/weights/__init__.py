"""From a model's name to filled parameters.

hub.py finds the folder, hf_config.py reads config.json, loader.py reads the weights.
"""
