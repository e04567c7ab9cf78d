"""The life of a packed weight that kernels multiply by."""

from typing import Any

from torch import Tensor, nn

from nanovllm.backends.cuda.triton.unnormed import Stream
from nanovllm.backends.quantised.packed import PackedWeight


class FusedWeight(PackedWeight):
    """A packed weight in the form that kernels read: a base before the class of its format.

    Kernels may want the codes in another order (woven), or read a tensor that is made of the scales
    (a copy). The runner calls these methods of all such weights of a model:

    1. `await_weights`, before the weights are read, because kernels are compiled meanwhile.
    2. `arrange`, when the weights have been read.
    3. `restore`, before graphs are captured, and `drop`, when the engine goes to sleep; `restore`
       again, when it wakes up.

    `take_weights` may be called between any two of them. During sleep it writes to the CPU's
    memory, and `restore` arranges what it wrote.
    """

    def await_weights(self) -> None:
        """Choose the form of the codes, whose kernels are compiled before weights are read.

        `arrange` must follow.
        """

    def arrange(self) -> None:
        """Bring weights that were just read into the form of the kernels.

        A graph may hold the addresses of copies, so those that exist are written again.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Make what was dropped, which the capture of a graph could not do."""
        self.arrange()

    def drop(self) -> None:
        """Free the memory of copies until `restore`."""

    def can_norm(self, row: Tensor) -> bool:
        """Tell whether the weight's product norms a row like this one [1, K] itself.

        If so, it takes the row as an Unnormed.
        """
        return False

    def can_add(self, row: Any) -> bool:
        """Tell whether `add` can multiply this row [1, K]."""
        return False

    def add(self, row: Tensor, bias: Tensor | None, residual: Tensor) -> Stream:
        """Multiply a row by the weight, and add the result to a residual stream [1, N]."""
        raise NotImplementedError

    def take_weights(self, plain: nn.Module) -> None:
        """Take the weights of a packed weight that is not fused."""
        self.copy_parameters(plain)
        self.arrange()
