"""Training loops over a data loader that load, copy and distribute the next batches while one batch computes."""

from pipe.train.base import TrainPipelineBase
from pipe.train.distribute import Distributes
from pipe.train.lane import InlineLane, Lane, Lanes, ThreadLane, Ticket
from pipe.train.prefetch import PrefetchTrainPipelineSparseDist
from pipe.train.schedule import Stage, TrainSchedule, plan
from pipe.train.sparse import EvalPipelineSparseDist, TrainPipelineSparseDist
from pipe.train.statistics import Statistics

__all__ = [
    "Distributes",
    "EvalPipelineSparseDist",
    "InlineLane",
    "Lane",
    "Lanes",
    "PrefetchTrainPipelineSparseDist",
    "Stage",
    "Statistics",
    "ThreadLane",
    "Ticket",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainSchedule",
    "plan",
]
