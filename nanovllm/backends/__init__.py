"""The same results, faster or on more devices."""
