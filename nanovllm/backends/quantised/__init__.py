"""Quantised layers, which hold weights in 4 or 8 bits and compute with what these stand for.

config.py reads which format each weight of a checkpoint has. packed.py holds a weight; fp8.py,
integers.py and fp4.py are its formats. layers.py puts quantised layers in the plain ones' places.
"""
