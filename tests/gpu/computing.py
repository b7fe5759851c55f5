"""A layer's computation: products of matrices, as many as take a given time. Queued on the GPU, done at once in a rehearsal."""

import time

import torch

from tests.gpu import setting

ORDER = 64 if setting.IS_REHEARSAL else 4096
TRIALS = 20


class Computing:
    """See the module. One thread."""

    def __init__(self) -> None:
        dtype = torch.float32 if setting.IS_REHEARSAL else torch.bfloat16
        self._one = torch.randn(ORDER, ORDER, dtype=dtype, device=setting.TORCH_DEVICE)
        self._count = 1

    def adjust(self, seconds: float) -> None:
        """Make a layer take about this long, or a product where that takes longer."""
        self.run(TRIALS)
        began = time.perf_counter()
        self.run(TRIALS)
        each_s = (time.perf_counter() - began) / TRIALS
        self._count = max(1, round(seconds / each_s))

    def queue(self) -> None:
        """One layer."""
        for _ in range(self._count):
            torch.matmul(self._one, self._one)

    def wait(self) -> None:
        """Until all that was queued is done."""
        if not setting.IS_REHEARSAL:
            torch.cuda.synchronize()

    def run(self, layers: int) -> None:
        """Some layers, to the end."""
        for _ in range(layers):
            self.queue()
        self.wait()
