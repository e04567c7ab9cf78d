"""What ends a job. Each message says what to do; what was computed before is in the journal."""


class JobError(Exception):
    """The job cannot go on."""


class RefusedError(JobError):
    """The job cannot begin as it is asked for: wrong options, or not those it was begun with."""
