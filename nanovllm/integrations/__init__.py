"""The library inside tools that others wrote. Each file needs its tool, and uses what any script
may use.
"""
