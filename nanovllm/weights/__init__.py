"""From a model's name to filled parameters.

hub.py finds the folder, model_files.py reads its JSON files, loader.py reads the weights.
"""
