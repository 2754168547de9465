"""Training ternary models: gradients in NumPy, beside the forward pass whose they are.

ops.py      each op and its gradient          network.py    one sequence forwards and backwards
optimizer.py  AdamW, clipping, schedules      trainer.py    batches, steps, saving
"""

from .optimizer import AdamW, Schedule
from .trainer import Trainer

__all__ = ["AdamW", "Schedule", "Trainer"]
