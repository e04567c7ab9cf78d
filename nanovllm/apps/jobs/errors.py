"""Errors that end a job. Each message names a remedy; the journal keeps all earlier results."""


class JobError(Exception):
    """An error after which the job cannot continue."""


class RefusedError(JobError):
    """An error before the job starts: wrong options, or other options than in an earlier run."""
