"""The course: an engine that the reader builds, and the runs and drawings of its chapters."""
