"""Quantised layers, which hold weights in 4 or 8 bits and compute with what these stand for.

config.py reads which format each weight of a checkpoint has. packed.py holds a weight; fp8.py,
fp4.py, integers.py and int8.py are its formats. layers.py puts quantised layers in the plain ones'
places. kv_cache.py gives attention layers the scales of a KV cache in FP8.
"""
