"""An inference engine in about three hundred lines, which the reader of the course builds."""
