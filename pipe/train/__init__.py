"""Training loops over a data loader that load, copy and distribute the next batches while one batch computes."""

from pipe.train.base import Statistics, TrainPipelineBase
from pipe.train.distribute import Distributes
from pipe.train.lane import InlineLane, Lane, Lanes, ThreadLane, Ticket
from pipe.train.sparse import EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist

__all__ = [
    "Distributes",
    "EvalPipelineSparseDist",
    "InlineLane",
    "Lane",
    "Lanes",
    "PrefetchTrainPipelineSparseDist",
    "Statistics",
    "ThreadLane",
    "Ticket",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
]
