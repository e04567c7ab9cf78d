"""What every layer of the library may use; imports nothing above itself."""
