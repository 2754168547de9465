"""Training ternary models: gradients in NumPy, beside the forward pass whose they are.

ops.py        each op and its gradient        network.py    one sequence forwards and backwards
optimizer.py  AdamW, Muon, schedules          trainer.py    batches, steps, saving
data.py       texts as rows of tokens         run.py        a run from a TOML file, with checkpoints
"""

from .optimizer import AdamW, Schedule
from .run import RunSettings, TrainingRun, read_run
from .trainer import Trainer

__all__ = ["AdamW", "RunSettings", "Schedule", "Trainer", "TrainingRun", "read_run"]
