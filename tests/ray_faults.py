"""What goes wrong in tests with Ray, for processes that Ray starts: they import it by this name."""

import os
import signal

from nanovllm.apps.ray import Generate


class DyingGenerate(Generate):
    """The first actor that comes to its second batch kills itself."""

    calls = 0

    def __call__(self, batch):
        self.calls += 1
        if self.calls == 2:
            try:
                os.close(os.open(os.environ["ONE_DEATH"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)
